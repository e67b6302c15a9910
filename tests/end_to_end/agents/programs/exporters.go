// Sends a span with each exporter of OpenTelemetry for Go: to wherever the environment says, and to the backend in the argument.
package main

import (
	"context"
	"log"
	"os"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/trace"
)

func main() {
	ctx := context.Background()
	send(ctx, "grpc", func() (*otlptrace.Exporter, error) { return otlptracegrpc.New(ctx) })
	send(ctx, "http-protobuf", func() (*otlptrace.Exporter, error) { return otlptracehttp.New(ctx) })
}

func send(ctx context.Context, name string, make func() (*otlptrace.Exporter, error)) {
	exporter, err := make()
	if err != nil {
		log.Fatal(err)
	}
	backend, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(os.Args[1]+"/v1/traces"))
	if err != nil {
		log.Fatal(err)
	}
	provider := trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithBatcher(backend))
	propagator := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	started := propagation.MapCarrier{"traceparent": os.Getenv("TRACEPARENT"), "baggage": os.Getenv("BAGGAGE")}
	_, span := provider.Tracer("agent").Start(propagator.Extract(ctx, started), name)
	span.End()
	if err := provider.Shutdown(ctx); err != nil {
		log.Fatal(err)
	}
}
