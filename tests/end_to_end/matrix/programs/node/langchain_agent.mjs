// LangChain.js: an agent with a tool; strictly, a schema for the answer.
import { createRequire } from "node:module";

const load = createRequire(process.env.NODE_PATH + "/");
const { createAgent, providerStrategy, tool } = load("langchain");
const { ChatOpenAI } = load("@langchain/openai");
const { z } = load("zod");

const choice = z.object({ box: z.enum(["red", "green", "blue"]) });
const look = tool(() => "8 kg", { name: "look", description: "Tells what is in a box.", schema: choice });
const agent = createAgent({
  model: new ChatOpenAI({ model: "policy", configuration: { baseURL: process.env.OPENAI_BASE_URL } }),
  tools: [look],
  systemPrompt: "You are a clerk.",
  ...(process.argv.includes("--strict") && { responseFormat: providerStrategy(choice) }),
});
for (const content of ["Find a heavy box.", "Find a light box."]) {
  const { messages } = await agent.invoke({ messages: [{ role: "user", content }] });
  console.log(messages.at(-1).content);
}
