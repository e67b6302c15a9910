"""OTLP in: a request is authorized, checked, redacted and durable before it is answered."""
