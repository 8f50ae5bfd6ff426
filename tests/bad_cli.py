"""Wrong words on the command line."""

from spmd._cli.commands import named_numbers
from tests.errors.registry import bad

bad(
    command_line_without_a_number=lambda mesh: named_numbers("--mesh", ["dp=2,tp"]),
    command_line_with_a_name_twice=lambda mesh: named_numbers("--size", ["b=2,d=4", "b=3"]),
)
