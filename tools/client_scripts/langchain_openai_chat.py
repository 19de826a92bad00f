"""langchain-openai: invoked, streamed, structured, with a tool, and over Responses."""

import sys

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
asked = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_tokens": 64}
chat = ChatOpenAI(**asked)
print("invoked:", chat.invoke("Who wrote Faust?").content)
print("streamed:", "".join(piece.content for piece in chat.stream("Who wrote Faust?")))


class Writer(pydantic.BaseModel):
    """What is asked for."""

    born: int


print("structured:", chat.with_structured_output(Writer, method="json_schema").invoke("Who wrote Faust?"))


@tool
def weather(is_paris: bool) -> str:
    """How the weather is."""
    return f"It is sunny in {'Paris' if is_paris else 'Rome'}."


question = HumanMessage("How is the weather in Paris?")
called = chat.bind_tools([weather], tool_choice="any").invoke([question])
call = called.tool_calls[0]
print("called:", call["name"], call["args"])
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
print("answer:", chat.invoke([question, called, result]).content)
print("responses:", ChatOpenAI(**asked, use_responses_api=True).invoke("Who wrote Faust?").text)
