"""litellm: completions whole, streamed and async, a tool, Responses."""

import asyncio
import sys

import litellm

url, model = sys.argv[1:]
messages = [{"role": "user", "content": "Who wrote Faust?"}]
asked = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
print("completion:", litellm.completion(**asked, messages=messages, max_tokens=16).choices[0].message.content)
pieces = litellm.completion(**asked, messages=messages, max_tokens=16, stream=True)
print("streamed:", "".join(piece.choices[0].delta.content or "" for piece in pieces))
told = asyncio.run(litellm.acompletion(**asked, messages=messages, max_tokens=16))
print("async:", told.choices[0].message.content)
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "parameters": {**schema, "additionalProperties": False}}}
told = litellm.completion(**asked, messages=messages, max_tokens=64, tools=[tool], tool_choice="required")
print("called:", told.choices[0].message.tool_calls[0].function)
told = litellm.responses(**asked, input="Who wrote Faust?", max_output_tokens=16)
print("response:", told.output[0].content[0].text)
