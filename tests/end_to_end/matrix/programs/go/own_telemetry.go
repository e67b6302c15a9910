// A Go program that traces itself: two questions, with a schema or without. It continues the trace of whoever started it.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"slices"
	"strings"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/trace"
)

type object = map[string]any

func main() {
	log.SetFlags(0)
	exporter, err := otlptracegrpc.New(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	provider := trace.NewTracerProvider(trace.WithBatcher(exporter))
	otel.SetTracerProvider(provider)
	propagator := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	otel.SetTextMapPropagator(propagator)
	started := propagation.MapCarrier{"traceparent": os.Getenv("TRACEPARENT"), "baggage": os.Getenv("BAGGAGE")}
	ctx, span := otel.Tracer("agent").Start(propagator.Extract(context.Background(), started), "go work")
	failure := work(ctx)
	span.End()
	if err := provider.Shutdown(context.Background()); err != nil {
		log.Print(err)
	}
	if failure != nil {
		log.Fatal(failure)
	}
}

func work(ctx context.Context) error {
	client := http.Client{Transport: otelhttp.NewTransport(http.DefaultTransport)}
	for _, question := range []string{"Find a heavy box.", "Find a light box."} {
		answer, err := ask(ctx, &client, question)
		if err != nil {
			return err
		}
		fmt.Println(answer)
	}
	return nil
}

func ask(ctx context.Context, client *http.Client, question string) (string, error) {
	body := object{
		"model": "policy",
		"messages": []object{
			{"role": "system", "content": "You are a clerk."},
			{"role": "user", "content": question},
		},
	}
	if slices.Contains(os.Args, "--strict") {
		schema := object{"enum": []string{"red", "green"}}
		body["response_format"] = object{"type": "json_schema", "json_schema": object{"name": "box", "schema": schema}}
	}
	text, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	url := os.Getenv("OPENAI_BASE_URL") + "/chat/completions"
	request, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(string(text)))
	if err != nil {
		return "", err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the policy answered %s", response.Status)
	}
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return "", err
	}
	return answer.Choices[0].Message.Content, nil
}
