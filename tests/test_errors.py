"""What an error says, however long what it is about."""

from vlmrun.errors import LONGEST, VlmrunError


def test_the_middle_of_a_long_message_is_left_out() -> None:
    """A damaged file's value of any length still makes one line that can be read."""
    whole = VlmrunError("config.json: " + "x" * 900, "say less")
    assert whole.message == "config.json: " + "x" * 900
    error = VlmrunError(f"config.json: model_type is {'x' * 100_000!r}, which is unknown", "say")
    assert len(error.message) < LONGEST
    assert error.message.startswith("config.json: model_type is 'xxx")
    assert error.message.endswith("xxx', which is unknown")
    assert str(error) == error.message
