// The openai package for Node: two questions, with a schema or without.
import { createRequire } from "node:module";

const OpenAI = createRequire(process.env.NODE_PATH + "/")("openai");

const client = new OpenAI();
const schema = { type: "object", properties: { box: { enum: ["red", "green"] } }, required: ["box"], additionalProperties: false };
const strict = process.argv.includes("--strict");
for (const question of ["Find a heavy box.", "Find a light box."]) {
  const answer = await client.chat.completions.create({
    model: "policy",
    messages: [
      { role: "system", content: "You are a clerk." },
      { role: "user", content: question },
    ],
    ...(strict && { response_format: { type: "json_schema", json_schema: { name: "box", schema } } }),
  });
  console.log(answer.choices[0].message.content);
}
