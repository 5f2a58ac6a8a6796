"""Foreign text on its way to a person's terminal."""

__all__ = ["counted", "visible"]


def counted(number: int, noun: str) -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def visible(text: str) -> str:
    """Return ``text`` without anything a terminal would obey; line ends and tabs stay.

    What a guest, a registry or a file says can hold escape sequences that retitle, recolour or
    rewrite what is on the screen.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
