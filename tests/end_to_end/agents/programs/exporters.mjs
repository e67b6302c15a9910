// Sends a span with each exporter of OpenTelemetry for Node: to wherever the environment says, and to the backend in the argument.
import { ROOT_CONTEXT, propagation } from "@opentelemetry/api";
import { CompositePropagator, W3CBaggagePropagator, W3CTraceContextPropagator } from "@opentelemetry/core";
import { OTLPTraceExporter as ToBackend } from "@opentelemetry/exporter-trace-otlp-proto";
import { BasicTracerProvider, BatchSpanProcessor } from "@opentelemetry/sdk-trace-base";

const backend = process.argv[2];
propagation.setGlobalPropagator(
  new CompositePropagator({ propagators: [new W3CTraceContextPropagator(), new W3CBaggagePropagator()] }),
);
const started = { traceparent: process.env.TRACEPARENT, baggage: process.env.BAGGAGE };
const context = propagation.extract(ROOT_CONTEXT, started);
for (const [name, protocol] of [["grpc", "grpc"], ["http-protobuf", "proto"], ["http-json", "http"]]) {
  const { OTLPTraceExporter } = await import(`@opentelemetry/exporter-trace-otlp-${protocol}`);
  const exporters = [new OTLPTraceExporter(), new ToBackend({ url: `${backend}/v1/traces` })];
  const provider = new BasicTracerProvider({ spanProcessors: exporters.map((one) => new BatchSpanProcessor(one)) });
  provider.getTracer("agent").startSpan(name, {}, context).end();
  await provider.shutdown();
}
