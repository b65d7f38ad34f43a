// Vercel's AI SDK with its default provider of OpenAI's models, which speaks responses, streamed.
import { openai } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const QUESTIONS = ["What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?"];
const inputSchema = z.object({ city: z.string() });
const tools = {
  weather: tool({
    description: "Tell the weather in a city.",
    inputSchema,
    execute: async () => "18 degrees and sunny",
  }),
  clock: tool({ description: "Tell the time in a city.", inputSchema, execute: async () => "12:30" }),
};

const messages = [];
const answers = [];
let id = null;
for (const content of QUESTIONS) {
  messages.push({ role: "user", content });
  const result = streamText({
    model: openai(process.env.MODEL),
    system: "You are a helpful assistant.",
    messages,
    tools,
    stopWhen: stepCountIs(5),
  });
  answers.push(await result.text);
  messages.push(...(await result.responseMessages));
  id = (await result.response).id;
}
console.log(JSON.stringify({ answers, id }));
