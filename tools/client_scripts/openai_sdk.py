"""openai: chats, async, `.parse`, Responses by id, in the background and in a conversation; its retries are on."""

import asyncio
import sys
import time

import openai
import pydantic

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
messages = [{"role": "user", "content": "Who wrote Faust?"}]
told = client.chat.completions.create(model=model, messages=messages, max_tokens=16)
print("chat:", told.choices[0].message.content)
messages += [told.choices[0].message, {"role": "user", "content": "When?"}]
pieces = client.chat.completions.create(model=model, messages=messages, max_tokens=16, stream=True)
print("streamed:", "".join(piece.choices[0].delta.content or "" for piece in pieces))


class Writer(pydantic.BaseModel):
    """What is asked for."""

    born: int


parsed = client.chat.completions.parse(model=model, messages=messages[:1], max_tokens=64, response_format=Writer)
print("parsed:", parsed.choices[0].message.parsed)


async def ask() -> None:
    """The same without waiting."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as other:
        told = await other.chat.completions.create(model=model, messages=messages[:1], max_tokens=8)
        print("async:", told.choices[0].message.content)


asyncio.run(ask())
first = client.responses.create(model=model, input="Who wrote Faust?", max_output_tokens=16)
second = client.responses.create(
    model=model, input="When?", previous_response_id=first.id, max_output_tokens=16, background=True
)
while second.status in ("queued", "in_progress"):
    time.sleep(0.1)
    second = client.responses.retrieve(second.id)
cached = second.usage.input_tokens_details.cached_tokens
print("response:", second.output_text, f"({cached} tokens were cached)")
if cached == 0:
    sys.exit("the first response's KV must be reused")
held = client.conversations.create(metadata={"topic": "Faust"}, items=messages[:1])
third = client.responses.create(model=model, input="And when?", conversation=held.id, max_output_tokens=16)
print("conversation:", third.output_text)
