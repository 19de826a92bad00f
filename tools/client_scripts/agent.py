"""An agent's loop with one tool, over openai's Responses: called, answered by its result, gone on with by id."""

import json
import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tools = [{"type": "function", "name": "weather", "parameters": {**schema, "additionalProperties": False}}]
items, last, choice = [{"role": "user", "content": "How is the weather in Paris?"}], None, "required"
for _ in range(4):
    told = client.responses.create(
        model=model, input=items, tools=tools, tool_choice=choice, previous_response_id=last, max_output_tokens=64
    )
    calls = [item for item in told.output if item.type == "function_call"]
    print([item.type for item in told.output], f"{told.usage.input_tokens_details.cached_tokens} tokens were cached")
    if not calls:
        break
    results = [f"It is sunny in {json.loads(call.arguments)['city']}." for call in calls]
    items = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, results, strict=True)
    ]
    last, choice = told.id, "none"
print("answer:", told.output_text)
if last is None:
    sys.exit("the tool must have been called")
