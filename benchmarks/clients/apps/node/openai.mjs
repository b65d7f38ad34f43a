// OpenAI's client for Node, with its own loop over tool calls.
import OpenAI from "openai";

const QUESTIONS = ["What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?"];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = (name, description, answer) => ({
  type: "function",
  function: { name, description, parameters, parse: JSON.parse, function: () => answer },
});
const tools = [
  tool("weather", "Tell the weather in a city.", "18 degrees and sunny"),
  tool("clock", "Tell the time in a city.", "12:30"),
];

const client = new OpenAI();
let messages = [{ role: "system", content: "You are a helpful assistant." }];
const answers = [];
let id = null;
for (const content of QUESTIONS) {
  messages.push({ role: "user", content });
  const runner = client.chat.completions.runTools({ model: process.env.MODEL, messages, tools });
  answers.push(await runner.finalContent());
  messages = [...runner.messages];
  id = (await runner.finalChatCompletion()).id;
}
console.log(JSON.stringify({ answers, id }));
