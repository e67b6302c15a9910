"""Traces from files of other tools, as OTLP spans and evaluations.

In reading order:

- `importing`: reads all sources and sends what they become.
- `formats/`: one module per format; `catalog` lists them and finds the format of a file by its content.
- `recorded`: model calls, tool calls and messages of other tools in the attributes of OpenTelemetry's GenAI conventions.
- `otlp_json`, `traces`: spans and evaluations as OTLP messages, with ids derived from those of the source.
- `source_files`: files, compressed or not, as records with their line numbers.
- `delivery`: sends to the collector until it acknowledges; `account` counts what was kept and what was not.
"""
