"""An agent as one finds them: the openai SDK, and a loop over the tool calls. It knows nothing of async-rl.

python recipes/agents/openai_agent.py "Solve the following multiplication: 12 * 34."
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The product of whole numbers, written with *.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculate(arguments: str) -> str:
    try:
        first, second = json.loads(arguments)["expression"].split("*")
        return str(int(first) * int(second))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


async def solve(question: str, client: AsyncOpenAI, model: str = "gpt-5-mini") -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(sys.argv[1], AsyncOpenAI())))
