"""A tool, and how it is used now and then: products of two numbers, too large to be known by heart."""

import ast
import operator
import random

from async_rl.trajectory import Task

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def calculate(expression: str) -> int:
    """The value of an arithmetic expression: whole numbers, +, -, *, brackets."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(operand))
        raise ValueError(f"{ast.unparse(node)}: only whole numbers, +, -, * and brackets")

    return value(ast.parse(expression, mode="eval").body)


def call(expression: str) -> str:
    """As the model writes it."""
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def demonstrate(task: Task, chance: random.Random) -> list[str | list[str]]:
    """For the warm-up: now and then the tool is used rightly; mostly the answer is guessed, or the call is wrong."""
    expression = task.text.rpartition(": ")[2].partition(". ")[0].replace(" ", "")
    guess = str(chance.randrange(100, 9999))
    match chance.choices(["right", "guess", "mistyped", "malformed", "ignored"], [3, 3, 2, 1, 2])[0]:
        case "right":
            return [call(expression), [task.answer or ""], task.answer or ""]
        case "guess":
            return [guess]
        case "mistyped":
            digits = [k for k, c in enumerate(expression) if c.isdigit()]
            place = chance.choice(digits)
            wrong = expression[:place] + str(chance.randrange(1, 10)) + expression[place + 1 :]
            return [call(wrong), [str(calculate(wrong))], str(calculate(wrong))]
        case "malformed":
            written = call(expression).replace('"}}', '"', 1)
            return [written, ["error: not valid JSON"], guess]
        case _:
            return [call(expression), [task.answer or ""], guess]
