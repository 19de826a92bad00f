"""anthropic: messages whole and streamed, tokens counted, a tool called."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none")
asked = {"model": model, "messages": [{"role": "user", "content": "Who wrote Faust?"}]}
print("counted:", client.messages.count_tokens(**asked).input_tokens)
print("message:", client.messages.create(**asked, max_tokens=16).content[0].text)
with client.messages.stream(**asked, max_tokens=16) as stream:
    print("streamed:", stream.get_final_text())
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tool = {"name": "weather", "input_schema": {**schema, "additionalProperties": False}}
told = client.messages.create(**asked, max_tokens=64, tools=[tool], tool_choice={"type": "tool", "name": "weather"})
print("called:", told.content[-1].name, told.content[-1].input, told.stop_reason)
if told.stop_reason != "tool_use":
    sys.exit("the tool must be called")
