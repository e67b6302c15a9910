// The Vercel AI SDK: generateText with a tool; strictly, an object by a schema.
import { createRequire } from "node:module";

const load = createRequire(process.env.NODE_PATH + "/");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { generateText, Output, tool } = load("ai");
const { z } = load("zod");

const provider = createOpenAICompatible({
  name: "policy",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  supportsStructuredOutputs: true,
});
const look = tool({ description: "Tells what is in a box.", inputSchema: z.object({ box: z.string() }), execute: async () => "8 kg" });
const choice = z.object({ box: z.enum(["red", "green", "blue"]) });
const options = process.argv.includes("--strict") ? { output: Output.object({ schema: choice }) } : { tools: { look } };
for (const prompt of ["Find a heavy box.", "Find a light box."]) {
  const result = await generateText({ model: provider("policy"), instructions: "You are a clerk.", prompt, ...options });
  console.log(result.text);
}
