// A session of the Vercel AI SDK: node session.mjs BASE_URL MODEL PROVIDER. Prints what the steps have given, as one JSON
// object. The providers speak chat completions, Responses and Messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name, kind] = process.argv.slice(2);
const settings = { baseURL, apiKey: "none" };
const providers = {
  compatible: () =>
    createOpenAICompatible({
      ...settings,
      name: "forwardscope",
      includeUsage: true,
      supportsStructuredOutputs: true,
    }),
  openai: () => createOpenAI(settings),
  anthropic: () => createAnthropic(settings),
};
const model = providers[kind]()(name);
const common = {
  model,
  temperature: 0,
  maxRetries: 0,
  maxOutputTokens: 60,
  providerOptions: {
    forwardscope: { parallel_tool_calls: false },
    openai: { parallelToolCalls: false, store: false },
    anthropic: { disableParallelToolUse: true },
  },
};
const cities = z.enum(["Paris", "Rome"]);
const tools = {
  getWeather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: cities }),
    execute: async ({ city }) => ({ city, weather: "rain" }),
  }),
};
// The first step of each turn demands a call, and the second one answers.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });

const found = { turns: [] };
const messages = [];
for (const question of ["What is the weather in Rome?", "And in Paris?", "Where is it wet?"]) {
  messages.push({ role: "user", content: question });
  const turn = await generateText({ ...common, messages, tools, prepareStep, stopWhen: stepCountIs(2) });
  messages.push(...turn.response.messages);
  found.turns.push({
    calls: turn.steps[0].toolCalls.map(({ toolName, input }) => ({ toolName, input })),
    results: turn.steps[0].toolResults.map(({ output }) => output),
    finishReasons: turn.steps.map((step) => step.finishReason),
    text: turn.text,
    inputTokens: turn.usage.inputTokens,
  });
}

const stream = streamText({ ...common, messages, tools, prepareStep, stopWhen: stepCountIs(2) });
found.stream = { types: new Set(), text: "" };
for await (const part of stream.fullStream) {
  found.stream.types.add(part.type);
  if (part.type === "error") throw part.error;
  if (part.type === "text-delta") found.stream.text += part.text;
}
found.stream.types = [...found.stream.types];
found.stream.outputTokens = (await stream.usage).outputTokens;

const person = z.object({ city: cities, size: z.enum(["small", "large"]) });
found.object = (await generateObject({ ...common, schema: person, prompt: "Tell me about Paris." })).object;

try {
  await generateText({ ...common, prompt: "the cat sat on the mat ".repeat(20000) });
} catch (error) {
  found.tooLong = { message: error.message, status: error.statusCode };
}
console.log(JSON.stringify(found));
