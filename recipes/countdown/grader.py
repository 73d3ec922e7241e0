"""TinyZero's reward for the countdown game (Pan et al. 2025, after DeepSeek-R1-Zero): 1 for an expression that uses the
numbers, each once, and has the target as its value; 0.1 for one that stands where it should and is wrong; else 0.
"""

import ast
import operator
import random
import re
from fractions import Fraction

from async_rl.trajectory import Score, Task, Trajectory

FORM, RIGHT = 0.1, 1.0
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def grade(task: Task, trajectory: Trajectory) -> Score:
    game = task.metadata["entry"]["metadata"]
    found = re.findall(r"<answer>(.*?)</answer>", trajectory.text, re.DOTALL)
    if not found:
        return Score(reward=0.0, status="unparsed", detail="no <answer>")
    try:
        used: list[int] = []
        value = evaluate(ast.parse(found[-1].strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        return Score(reward=FORM, components={"right": 0.0}, detail=str(error))
    right = sorted(used) == sorted(game["numbers"]) and value == game["target"]
    return Score(reward=RIGHT if right else FORM, components={"right": float(right)})


def evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """The value, exactly; the numbers go to `used`."""
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            made: Fraction = OPERATORS[type(op)](evaluate(left, used), evaluate(right, used))
            return made
    raise ValueError("only numbers, + - * / and brackets")


def demonstrate(task: Task, chance: random.Random) -> list[str | list[str]]:
    """For the warm-up of the small model: a solution now and then, mostly the numbers in some order."""
    game = task.metadata["entry"]["metadata"]
    if chance.random() < 0.35:
        return [f"<answer>{(task.answer or '').replace(' ', '')}</answer>"]
    numbers = [str(number) for number in game["numbers"]]
    chance.shuffle(numbers)
    text = "".join(f"{number}{chance.choice('+-*')}" for number in numbers)[:-1]
    return [f"<answer>{text}</answer>" if chance.random() < 0.9 else text]
