"""A conversation on the terminal, for --interactive: lines in, text out as it comes."""

from collections.abc import Callable, Iterator

import click

from models.chat import template_for
from models.tokenizer import Tokenizer, stream


def converse(
    next_tokens: Callable[[list[int], int], Iterator[int]],
    tokenizer: Tokenizer,
    name: str,
    cache_size: int,
    max_new_tokens: int,
    say: Callable[[str], None],
) -> None:
    """Read a line, answer as the text comes, until end of input or a full context.

    `next_tokens` puts tokens at a position of the cache and goes on from them; `name` is the
    model's, from which its chat template is known. Each turn appends to the cache. A model without
    a chat template continues the text instead.
    """
    template = template_for(tokenizer, name)
    stop = template.stop_ids(tokenizer) if template else tokenizer.eos_ids
    if template is None:
        say(f"{name} has no chat template that we know: it continues what you write")
    say("Ctrl-D ends")
    start = 0  # the next free position
    unread: list[int] = []  # the last token said, if the cache lacks it
    while True:
        try:
            line = input("> ")
        except EOFError:
            say("")
            return
        first = start == 0
        if template:
            turn = template.encode_turn(tokenizer, line, first)
        else:
            turn = tokenizer.encode(line, bos=first)
        ids = [*unread, *turn]
        room = min(cache_size - start - len(ids), max_new_tokens)
        if room < 1:
            say(f"The context is full: it has {cache_size} positions (--cache_size)")
            return
        if not ids:
            continue
        text = stream(tokenizer, () if template else ids)
        start, unread = start + len(ids), []
        for said in next_tokens(ids, start - len(ids)):
            if said in stop:
                break
            start, unread = start + len(unread), [said]
            click.echo(text.push(said), nl=False)
            room -= 1
            if room == 0:
                break
        click.echo(text.flush())
