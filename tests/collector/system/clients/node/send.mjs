// Sends one trace and one log record with the OpenTelemetry SDK. Arguments: grpc|proto|http, endpoint, none|gzip, the
// trace's attributes as JSON, and optionally a token. Prints what it made, as JSON: ids and times.
import { ROOT_CONTEXT, SpanKind, SpanStatusCode, TraceFlags, trace } from "@opentelemetry/api";
import { SeverityNumber } from "@opentelemetry/api-logs";
import { resourceFromAttributes } from "@opentelemetry/resources";
import { BatchLogRecordProcessor, LoggerProvider } from "@opentelemetry/sdk-logs";
import { BasicTracerProvider, BatchSpanProcessor } from "@opentelemetry/sdk-trace-base";

const [protocol, endpoint, compression, attributesJson, token] = process.argv.slice(2);
const { OTLPTraceExporter } = await import(`@opentelemetry/exporter-trace-otlp-${protocol}`);
const { OTLPLogExporter } = await import(`@opentelemetry/exporter-logs-otlp-${protocol}`);

async function options(signal) {
  if (protocol !== "grpc") {
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    return { url: `${endpoint}/v1/${signal}`, compression, headers };
  }
  if (!token) return { url: endpoint, compression };
  const { Metadata } = await import("@grpc/grpc-js");
  const metadata = new Metadata();
  metadata.set("authorization", `Bearer ${token}`);
  return { url: endpoint, compression, metadata };
}

const resource = resourceFromAttributes({ "service.name": "node-agent", replicas: 2, on: true });
const tracers = new BasicTracerProvider({
  resource,
  spanProcessors: [new BatchSpanProcessor(new OTLPTraceExporter(await options("traces")))],
});
const loggers = new LoggerProvider({
  resource,
  processors: [new BatchLogRecordProcessor({ exporter: new OTLPLogExporter(await options("logs")) })],
});
const tracer = tracers.getTracer("node.scope", "7.8", { schemaUrl: "https://schema" });
const attributes = JSON.parse(attributesJson);
const linked = { traceId: "0af7651916cd43dd8448eb211c80319c", spanId: "b7ad6b7169203331", traceFlags: TraceFlags.SAMPLED };
const parent = tracer.startSpan("parent '; DROP TABLE spans; --", {}, ROOT_CONTEXT);
const within = trace.setSpan(ROOT_CONTEXT, parent);
const child = tracer.startSpan(
  "child \u0000\u{1F600}",
  { kind: SpanKind.CLIENT, attributes, links: [{ context: linked, attributes: { why: "retry", n: 3 } }], startTime: [1700000000, 123456789] },
  within,
);
child.addEvent("happened", { ok: true, list: [1, 2] }, [1700000000, 200000001]);
child.setStatus({ code: SpanStatusCode.ERROR, message: "it broke" });
child.end([1700000001, 5]);
parent.end();
loggers.getLogger("node.scope").emit({
  eventName: "said",
  body: { text: "hello \u{1F600}", n: 1, deep: [{ a: null }] },
  severityNumber: SeverityNumber.WARN,
  attributes: { "log.key": "v" },
  context: within,
});
await tracers.shutdown();
await loggers.shutdown();
const context = child.spanContext();
console.log(JSON.stringify({ traceId: context.traceId, child: context.spanId, parent: parent.spanContext().spanId }));
