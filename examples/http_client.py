"""A conversation over HTTP with OpenAI's client, by its whole history and by its name.

ca_jax serve &                                    # until http://127.0.0.1:8000/health answers 200
python examples/http_client.py                    # needs: pip install openai
"""

from __future__ import annotations

import argparse

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api_key", default="none")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id

    # As with any server: the whole history each time. It prefills only what is new.
    history: list = []
    for question in ("Name three rivers of France.", "Which of them is the longest?"):
        history.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model, messages=history, max_tokens=48, stream=True, stream_options={"include_usage": True}
        )
        said = ""
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                said += chunk.choices[0].delta.content
            if chunk.usage is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"> {question}\n{said}\n{cached} of {chunk.usage.prompt_tokens} prompt tokens were stored\n")
        history.append({"role": "assistant", "content": said})

    # By name: the server holds the conversation, and messages are what is new. The state says where it must stand.
    answer = client.chat.completions.create(model=model, messages=history[:1], max_tokens=16)
    more = {"session_id": answer.session_id, "session_state": answer.session_state}
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Are you sure?"}], max_tokens=16, extra_body=more
    )
    print(f"> Are you sure?\n{answer.choices[0].message.content}\n{answer.usage.ca_jax}")


if __name__ == "__main__":
    main()
