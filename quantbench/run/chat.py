"""A conversation on the terminal, for --interactive."""

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING

import click
import torch

from quantbench.errors import UsageError
from quantbench.models.chat import TemplateChat, chat_of
from quantbench.models.tokenizer import TextStream
from quantbench.progress import say
from quantbench.run.plan import Plan
from quantbench.text import counted

if TYPE_CHECKING:
    from quantbench.generate import Generator

COMMAND = re.compile("/[a-z]+")  # a line of one word; anything else is for the model
ENDS = ("/quit", "/exit", "/bye")
HELP = "/reset forgets the conversation, /help shows this, /quit or Ctrl-D ends it"


def chat(plan: Plan, generator: "Generator") -> None:
    """Read a line and print the answer while it is generated, until end of input or a full context.

    An answer has at most --max_new_tokens. A model without a chat template continues the text
    instead of answering. After each answer it says how many tokens came how fast. Lines that
    COMMAND matches are commands.
    """
    torch.manual_seed(plan.config.seed)
    tokenizer, name, cache_size = plan.tokenizer, plan.name, plan.cache_size
    chat = chat_of(tokenizer, name, datetime.now())
    continues = not isinstance(chat, TemplateChat)
    if continues:
        say(
            f"{name} brings no chat template, and its name tells none: it continues the text that "
            "you write"
        )
    say(HELP)
    while True:
        try:
            line = input("> ")
        except EOFError:
            say("")
            return
        except (OSError, ValueError) as error:  # a folder, or a file that is only written
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--interactive cannot read stdin: {why}") from None
        if COMMAND.fullmatch(line.strip()):
            if line.strip() in ENDS:
                return
            if line.strip() == "/reset":
                chat.reset()
                say("Forgotten: the next line starts a new conversation")
            else:
                say(HELP)
            continue
        try:
            ids, start = chat.ask(line, generator.keep)
        except UsageError as error:
            say(str(error))
            continue
        room = min(cache_size - start - len(ids), plan.config.max_new_tokens)
        if room < 1:
            say(
                f"The context is full: it has {cache_size} positions; --cache_size gives it more, "
                "and /reset starts anew"
            )
            if not chat.turns:  # not even this line fits
                return
            continue
        if not ids:
            continue
        text = TextStream(tokenizer, ids if continues else ())
        answer: list[int] = []
        arrivals = [time.perf_counter()]
        for tensor in generator.stream(torch.tensor([ids], device=plan.device), start):
            token = int(tensor)
            arrivals.append(time.perf_counter())
            if token in chat.stop_ids:
                break
            answer.append(token)
            click.echo(text.push(token), nl=False)
            room -= 1
            if room == 0:
                break
        chat.answered(answer)
        click.echo(text.flush())
        most = plan.config.max_new_tokens
        why = f"--max_new_tokens {most}" if len(answer) == most else "the end of the context"
        cut = f"; cut off by {why}" * (room == 0)
        say(rate(arrivals) + cut if answer else "The model ended its answer at once")


def rate(arrivals: list[float]) -> str:
    """How fast an answer came. arrivals: when its line was sent, and when each token came."""
    tokens = len(arrivals) - 1
    if tokens == 0:
        return "no token"
    speed = f"{counted(tokens, 'token')}, the first after {arrivals[1] - arrivals[0]:.2f} s"
    if tokens == 1:
        return speed
    return f"{speed}, then {(tokens - 1) / (arrivals[-1] - arrivals[1]):.1f} tok/s"
