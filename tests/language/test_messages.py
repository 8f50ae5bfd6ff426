"""The text of every error of the layout language, pinned; and a run of each fix."""

import re

import numpy as np
import pytest

from spmd.errors import SpmdError
from spmd.language import Atom, AxisMapping, Dim, Layout, Pattern

NAMES = {one.__name__: one for one in (Atom, AxisMapping, Dim, Layout, Pattern)} | {"np": np}

# what is written, the kind of error, its text
GOLDEN = [
    (
        "Layout('b/dp d/dp')",
        "LayoutError",
        [
            'Layout("b/dp d/dp")',
            "             ^^^^",
            "A mesh axis occurs once in a layout, but 'dp' is used in 'b/dp' and in 'd/dp'.",
        ],
    ),
    (
        "Layout('b/dp/dp')",
        "LayoutError",
        [
            'Layout("b/dp/dp")',
            "        ^^^^^^^",
            "A mesh axis occurs once in a layout, but 'dp' is used twice in 'b/dp/dp'.",
        ],
    ),
    (
        "Layout('b/dp {U:dp}')",
        "LayoutError",
        [
            'Layout("b/dp {U:dp}")',
            "                ^^",
            "A mesh axis occurs once in a layout, but 'dp' is used in 'b/dp' and in {U:dp}.",
        ],
    ),
    (
        "Layout('{U:dp} {R:dp}')",
        "LayoutError",
        [
            'Layout("{U:dp} {R:dp}")',
            "                  ^^",
            "A mesh axis occurs once in a layout, but 'dp' is used in {U:dp} and in {R:dp}.",
        ],
    ),
    (
        "Layout('.../a')",
        "LayoutError",
        [
            'Layout(".../a")',
            "        ^^^^",
            "The dimensions of '...' lie as the operand has them; they take no axis and no margin.",
        ],
    ),
    (
        "Layout('...+1')",
        "LayoutError",
        [
            'Layout("...+1")',
            "        ^^^^",
            "The dimensions of '...' lie as the operand has them; they take no axis and no margin.",
        ],
    ),
    (
        "Layout('_/1')",
        "LayoutError",
        [
            'Layout("_/1")',
            "        ^^^",
            "An unnamed dimension is whole unless an axis divides it; '_' says so already.",
            'fix: "_"',
        ],
    ),
    (
        "Layout('{U:}')",
        "LayoutError",
        [
            'Layout("{U:}")',
            "        ^^^",
            "A mark names its mesh axes: {U:axis}.",
        ],
    ),
    (
        "Layout('{U}')",
        "LayoutError",
        [
            'Layout("{U}")',
            "        ^^^",
            "A mark names its mesh axes: {U:axis}.",
        ],
    ),
    (
        "Layout('{U dp}')",
        "LayoutError",
        [
            'Layout("{U dp}")',
            "        ^^",
            "A mark is written {U:axis}.",
        ],
    ),
    (
        "Layout('{U:3}')",
        "LayoutError",
        [
            'Layout("{U:3}")',
            "           ^",
            "A mark lists names of mesh axes, separated by commas.",
        ],
    ),
    (
        "Layout('b {U:dp/tp}')",
        "LayoutError",
        [
            'Layout("b {U:dp/tp}")',
            "               ^",
            "A mark lists names of mesh axes, separated by commas.",
            'fix: "b {U:dp,tp}"',
        ],
    ),
    (
        "Layout('(h k/tp)')",
        "LayoutError",
        [
            'Layout("(h k/tp)")',
            "           ^^^^",
            "A composite dimension is divided on its leading factors, but 'k/tp' comes after the whole factor 'h'.",
            "advice: divide 'h' too, or put 'k' first: (k h)/tp",
        ],
    ),
    (
        "Layout('()')",
        "LayoutError",
        [
            'Layout("()")',
            "        ^^",
            "A scalar is written 'scalar', not '()'.",
            'fix: "scalar"',
        ],
    ),
    (
        "Layout('b () d')",
        "LayoutError",
        [
            'Layout("b () d")',
            "          ^^",
            "A scalar is written 'scalar', not '()'.",
        ],
    ),
    (
        "Layout('b b')",
        "LayoutError",
        [
            'Layout("b b")',
            "          ^",
            "A name stands for one dimension of a layout, but 'b' occurs twice.",
        ],
    ),
    (
        "Layout('... d ...')",
        "LayoutError",
        [
            'Layout("... d ...")',
            "              ^^^",
            "A layout has at most one '...'.",
        ],
    ),
    (
        "Layout('(h k')",
        "LayoutError",
        [
            'Layout("(h k")',
            "        ^",
            "This '(' is never closed.",
        ],
    ),
    (
        "Layout('h k)')",
        "LayoutError",
        [
            'Layout("h k)")',
            "           ^",
            "')' closes nothing.",
        ],
    ),
    (
        "Layout('[k')",
        "LayoutError",
        [
            'Layout("[k")',
            "        ^",
            "This '[' is never closed.",
        ],
    ),
    (
        "Layout('[h')",
        "LayoutError",
        [
            'Layout("[h")',
            "        ^",
            "This '[' is never closed.",
        ],
    ),
    (
        "Layout('[k/tp')",
        "LayoutError",
        [
            'Layout("[k/tp")',
            "        ^",
            "This '[' is never closed.",
        ],
    ),
    (
        "Layout('b {U:dp')",
        "LayoutError",
        [
            'Layout("b {U:dp")',
            "          ^",
            "This '{' is never closed.",
        ],
    ),
    (
        "Layout('k]')",
        "LayoutError",
        [
            'Layout("k]")',
            "         ^",
            "']' closes nothing.",
        ],
    ),
    (
        "Layout('b}')",
        "LayoutError",
        [
            'Layout("b}")',
            "         ^",
            "'}' closes nothing.",
        ],
    ),
    (
        "Layout('b/ dp')",
        "LayoutError",
        [
            'Layout("b/ dp")',
            "         ^^",
            "No space stands before or after '/'.",
            'fix: "b/dp"',
        ],
    ),
    (
        "Layout('b /dp')",
        "LayoutError",
        [
            'Layout("b /dp")',
            "         ^^",
            "No space stands before or after '/'.",
            'fix: "b/dp"',
        ],
    ),
    (
        "Layout('b///dp')",
        "LayoutError",
        [
            'Layout("b///dp")',
            "         ^^^",
            "One '/' stands before each mesh axis.",
            'fix: "b/dp"',
        ],
    ),
    (
        "Layout('b/')",
        "LayoutError",
        [
            'Layout("b/")',
            "         ^",
            "'/' takes the name of a mesh axis, or 1 for whole.",
        ],
    ),
    (
        "Layout('b/2')",
        "LayoutError",
        [
            'Layout("b/2")',
            "          ^",
            "'/' takes the name of a mesh axis (or 1 for whole), not a number of devices.",
        ],
    ),
    (
        "Layout('b/1/tp')",
        "LayoutError",
        [
            'Layout("b/1/tp")',
            "        ^^^^^^",
            "'/1' says whole; no other axis stands beside it.",
        ],
    ),
    (
        "Layout('{U:a} {U:b}')",
        "LayoutError",
        [
            'Layout("{U:a} {U:b}")',
            "              ^^^^^",
            "A layout has one {U:...}; it lists all its axes.",
            "advice: {U:a,b}",
        ],
    ),
    (
        "Layout('{U:a} d')",
        "LayoutError",
        [
            'Layout("{U:a} d")',
            "              ^",
            "The marks {U:...} and {R:...} come after all dimensions.",
        ],
    ),
    (
        "Layout('{U:a,a}')",
        "LayoutError",
        [
            'Layout("{U:a,a}")',
            "             ^",
            "A mesh axis occurs once in a layout, but 'a' is twice in {U:...}.",
        ],
    ),
    (
        "Layout('{U:a b}')",
        "LayoutError",
        [
            'Layout("{U:a b}")',
            "             ^",
            "A mark lists names of mesh axes, separated by commas.",
            'fix: "{U:a,b}"',
        ],
    ),
    (
        "Layout('{u:a}')",
        "LayoutError",
        [
            'Layout("{u:a}")',
            "        ^^",
            "The marks are {U:axis}, a partial sum, and {R:axis}, reduced.",
            'fix: "{U:a}"',
        ],
    ),
    (
        "Layout('{V:a}')",
        "LayoutError",
        [
            'Layout("{V:a}")',
            "        ^^",
            "The marks are {U:axis}, a partial sum, and {R:axis}, reduced.",
        ],
    ),
    (
        "Layout('{n} s')",
        "LayoutError",
        [
            'Layout("{n} s")',
            "        ^^^",
            "Strings are constants: braces hold the marks {U:axis} and {R:axis}, and keywords bind sizes and mesh axes.",
            'advice: "n s", n=...',
        ],
    ),
    (
        "Layout('b/{axis} s')",
        "LayoutError",
        [
            'Layout("b/{axis} s")',
            "          ^^^^^^",
            "Strings are constants: braces hold the marks {U:axis} and {R:axis}, and keywords bind mesh axes.",
            'advice: "b/axis s", axis=...',
        ],
    ),
    (
        "Layout('(h {n})')",
        "LayoutError",
        [
            'Layout("(h {n})")',
            "           ^^^",
            "Strings are constants: braces hold the marks {U:axis} and {R:axis}, and keywords bind sizes and mesh axes.",
            'advice: "(h n)", n=...',
        ],
    ),
    (
        "Layout('scalar d')",
        "LayoutError",
        [
            'Layout("scalar d")',
            "        ^^^^^^",
            "'scalar' is a whole layout: no dimension, axis or mark stands beside it.",
        ],
    ),
    (
        "Layout('scalar {U:dp}')",
        "LayoutError",
        [
            'Layout("scalar {U:dp}")',
            "        ^^^^^^",
            "'scalar' is a whole layout: no dimension, axis or mark stands beside it.",
            'fix: "{U:dp}"',
        ],
    ),
    (
        "Layout('1+3')",
        "LayoutError",
        [
            'Layout("1+3")',
            "        ^^^",
            "Which of the two numbers is the margin? Name the dimension, or write both margins.",
            "advice: '1+3+0' or '0+1+3'",
        ],
    ),
    (
        "Layout('x/a +1')",
        "LayoutError",
        [
            'Layout("x/a +1")',
            "           ^^",
            "No space stands before or after '+'.",
            'fix: "x/a+1"',
        ],
    ),
    (
        "Layout('1+x+y')",
        "LayoutError",
        [
            'Layout("1+x+y")',
            "        ^^^^^",
            "A dimension has at most one margin on each side, and a margin is a number: '1+x/a+1'.",
        ],
    ),
    (
        "Layout('1+...')",
        "LayoutError",
        [
            'Layout("1+...")',
            "         ^",
            "A margin is a number beside a dimension, without spaces: '1+x/a+1'.",
        ],
    ),
    (
        "Layout('+1')",
        "LayoutError",
        [
            'Layout("+1")',
            "        ^",
            "A margin is a number beside a dimension: '1+x/a+1'.",
        ],
    ),
    (
        "Layout('[k]/tp')",
        "LayoutError",
        [
            'Layout("[k]/tp")',
            "           ^^^",
            "The mesh axis stands inside the brackets.",
            'fix: "[k/tp]"',
        ],
    ),
    (
        "Layout('[h k]')",
        "LayoutError",
        [
            'Layout("[h k]")',
            "           ^",
            "Brackets hold one dimension; give each its own.",
            'fix: "[h] [k]"',
        ],
    ),
    (
        "Layout('[k]+1')",
        "LayoutError",
        [
            'Layout("[k]+1")',
            "           ^",
            "A dimension in brackets has no margin.",
        ],
    ),
    (
        "Layout('[1+k]')",
        "LayoutError",
        [
            'Layout("[1+k]")',
            "          ^",
            "A dimension in brackets has no margin.",
        ],
    ),
    (
        "Layout('[]')",
        "LayoutError",
        [
            'Layout("[]")',
            "        ^^",
            "Brackets hold the dimension that the operation works along: '[k]'.",
        ],
    ),
    (
        "Layout('[...]')",
        "LayoutError",
        [
            'Layout("[...]")',
            "         ^^^",
            "Brackets hold one dimension: a name, a number or a '(h k)'.",
        ],
    ),
    (
        "Layout('(h 2)')",
        "LayoutError",
        [
            'Layout("(h 2)")',
            "           ^",
            "The factors of a '(h k)' are names; a keyword binds a size.",
            'fix: "(h n)", n=2',
        ],
    ),
    (
        "Layout('(h/1 k)')",
        "LayoutError",
        [
            'Layout("(h/1 k)")',
            "         ^^^",
            "A factor takes mesh axes only; '/1' stands after the whole of it: '(h k)/1'.",
        ],
    ),
    (
        "Layout('(h /tp k)')",
        "LayoutError",
        [
            'Layout("(h /tp k)")',
            "           ^",
            "No space stands before or after '/'.",
            'fix: "(h/tp k)"',
        ],
    ),
    (
        "Layout('(h ...)')",
        "LayoutError",
        [
            'Layout("(h ...)")',
            "           ^^^",
            "The factors of a '(h k)' are names.",
        ],
    ),
    (
        "Layout('(h/tp k)/dp')",
        "LayoutError",
        [
            'Layout("(h/tp k)/dp")',
            "        ^^^^^^^^^^^",
            "Mesh axes stand on the factors or after the whole '(h k)', not on both.",
        ],
    ),
    (
        "Layout('((a b) c)')",
        "LayoutError",
        [
            'Layout("((a b) c)")',
            "         ^",
            "A '(h k)' holds names, not another '('.",
        ],
    ),
    (
        "Layout('b(h k)')",
        "LayoutError",
        [
            'Layout("b(h k)")',
            "         ^",
            "Dimensions are separated by spaces.",
            'fix: "b (h k)"',
        ],
    ),
    (
        "Pattern('...d/dp,(h k)f->...f')",
        "LayoutError",
        [
            'Pattern("...d/dp,(h k)f->...f")',
            "            ^",
            "Dimensions are separated by spaces.",
            'fix: "... d/dp,(h k) f->... f"',
        ],
    ),
    (
        "Layout('b/(dp tp)')",
        "LayoutError",
        [
            'Layout("b/(dp tp)")',
            "          ^",
            "Several mesh axes are written one after another: 'b/dp/fsdp'.",
        ],
    ),
    (
        "Layout('a, b')",
        "LayoutError",
        [
            'Layout("a, b")',
            "         ^",
            "A layout has no comma; several layouts make a Pattern.",
        ],
    ),
    (
        "Layout('a -> b')",
        "LayoutError",
        [
            'Layout("a -> b")',
            "          ^^",
            "A layout has no '->'; two layouts with an arrow between them are a Pattern.",
        ],
    ),
    (
        "Layout('b..d')",
        "LayoutError",
        [
            'Layout("b..d")',
            "         ^^",
            "Any number of dimensions is written '...', three dots.",
            'fix: "b ... d"',
        ],
    ),
    (
        "Layout('b/dp … d')",
        "LayoutError",
        [
            'Layout("b/dp … d")',
            "             ^",
            "A layout has no '…'; write '...'.",
            'fix: "b/dp ... d"',
        ],
    ),
    (
        "Layout('b|dp')",
        "LayoutError",
        [
            'Layout("b|dp")',
            "         ^",
            "A layout has no '|'; write '/'.",
            'fix: "b/dp"',
        ],
    ),
    (
        "Layout('b*d')",
        "LayoutError",
        [
            'Layout("b*d")',
            "         ^",
            "A layout has no '*'; any number of dimensions is '...', a product of two is '(h k)'.",
        ],
    ),
    (
        "Layout('é')",
        "LayoutError",
        [
            'Layout("é")',
            "        ^",
            "Names consist of ASCII letters, digits and '_', and 'é' is not one of them.",
        ],
    ),
    (
        "Layout('b@d')",
        "LayoutError",
        [
            'Layout("b@d")',
            "         ^",
            "A layout has no character '@'.",
        ],
    ),
    (
        "Layout('b\\x00d')",
        "LayoutError",
        [
            'Layout("b?d")',
            "         ^",
            "A layout has no character 'U+0000'.",
        ],
    ),
    (
        "Layout('__')",
        "LayoutError",
        [
            'Layout("__")',
            "        ^^",
            "A name has a letter in it; '_' alone is an unnamed dimension.",
        ],
    ),
    (
        "Layout('b/_')",
        "LayoutError",
        [
            'Layout("b/_")',
            "          ^",
            "A mesh axis has a name with a letter in it.",
        ],
    ),
    (
        "Layout('3x')",
        "LayoutError",
        [
            'Layout("3x")',
            "        ^^",
            "A name begins with a letter.",
        ],
    ),
    (
        "Layout('b/1x')",
        "LayoutError",
        [
            'Layout("b/1x")',
            "          ^^",
            "A name begins with a letter.",
        ],
    ),
    (
        "Layout('9999999999999999999')",
        "LayoutError",
        [
            'Layout("9999999999999999999")',
            "        ^^^^^^^^^^^^^^^^^^^",
            "A literal size has at most 18 digits.",
        ],
    ),
    (
        "Layout('b:c')",
        "LayoutError",
        [
            'Layout("b:c")',
            "         ^",
            "A ':' occurs only in the marks {U:axis} and {R:axis}.",
        ],
    ),
    (
        "Layout('/dp')",
        "LayoutError",
        [
            'Layout("/dp")',
            "        ^",
            "A dimension comes before '/': 'b/dp' is b divided over dp.",
        ],
    ),
    (
        "Layout('b\\td d\\tb')",
        "LayoutError",
        [
            'Layout("b d d b")',
            "            ^",
            "A name stands for one dimension of a layout, but 'd' occurs twice.",
        ],
    ),
    (
        "Pattern('a b')",
        "LayoutError",
        [
            'Pattern("a b")',
            "         ^^^",
            "A pattern has two sides with '->' between them: what you have -> what you want.",
            'advice: "a b -> ..." with what you want in place of the dots',
        ],
    ),
    (
        "Pattern('')",
        "LayoutError",
        [
            'Pattern("")',
            "         ^",
            "A pattern has two sides with '->' between them: what you have -> what you want.",
        ],
    ),
    (
        "Pattern('a -> b -> c')",
        "LayoutError",
        [
            'Pattern("a -> b -> c")',
            "                ^^",
            "A pattern has one '->', this is the second.",
        ],
    ),
    (
        "Pattern('a, , b -> c')",
        "LayoutError",
        [
            'Pattern("a, , b -> c")',
            "            ^",
            "A layout is empty only when it is the whole side; a scalar among others is 'scalar'.",
            'fix: "a, scalar, b -> c"',
        ],
    ),
    (
        "Pattern(', a -> b')",
        "LayoutError",
        [
            'Pattern(", a -> b")',
            "         ^",
            "A layout is empty only when it is the whole side; a scalar among others is 'scalar'.",
            'fix: "scalar, a -> b"',
        ],
    ),
    (
        "Pattern('->,')",
        "LayoutError",
        [
            'Pattern("->,")',
            "           ^",
            "A layout is empty only when it is the whole side; a scalar among others is 'scalar'.",
            'fix: "->scalar,"',
        ],
    ),
    (
        "Pattern('a => b')",
        "LayoutError",
        [
            'Pattern("a => b")',
            "           ^^",
            "The two sides of a pattern are separated by '->'.",
            'fix: "a -> b"',
        ],
    ),
    (
        "Pattern('a --> b')",
        "LayoutError",
        [
            'Pattern("a --> b")',
            "           ^^^",
            "The two sides of a pattern are separated by '->'.",
            'fix: "a -> b"',
        ],
    ),
    (
        "Pattern('a → b')",
        "LayoutError",
        [
            'Pattern("a → b")',
            "           ^",
            "A layout has no '→'; write '->'.",
            'fix: "a -> b"',
        ],
    ),
    (
        "Pattern('b/dp d,\\n    d/tp f/tp,\\n-> b/dp f/tp')",
        "LayoutError",
        [
            'Pattern("..."), line 2: d/tp f/tp,',
            "                             ^^^^",
            "A mesh axis occurs once in a layout, but 'tp' is used in 'd/tp' and in 'f/tp'.",
        ],
    ),
    (
        "Pattern('dim0/axis0 dim1/axis1 dim2/axis2 dim3/axis3 dim4/axis4 dim5/axis5 dim6/axis6 dim7/axis7 dim8/axis8 dim9/axis9 dim10/axis10 dim11/axis11 dim12/axis12 dim13/axis13 dim14/axis14 dim15/axis15 dim16/axis16 dim17/axis17 dim18/axis18 dim19/axis19 oops/axis3 -> b')",
        "LayoutError",
        [
            '... dim17/axis17 dim18/axis18 dim19/axis19 oops/axis3 -> b")',
            "                                           ^^^^^^^^^^",
            "A mesh axis occurs once in a layout, but 'axis3' is used in 'dim3/axis3' and in 'oops/axis3'.",
        ],
    ),
    (
        "Pattern('b [c/cp] l -> b', arrow=False)",
        "LayoutError",
        [
            'Pattern("b [c/cp] l -> b")',
            "                    ^^",
            "This takes the layout of its operands only, without '->'.",
            'fix: "b [c/cp] l"',
        ],
    ),
    (
        "Pattern('b/dp -> c', call='all_gather(x, \"b/dp -> c\")') and Pattern('b/dp/dp -> c', call='all_gather(x, \"b/dp/dp -> c\")')",
        "LayoutError",
        [
            'all_gather(x, "b/dp/dp -> c")',
            "               ^^^^^^^",
            "A mesh axis occurs once in a layout, but 'dp' is used twice in 'b/dp/dp'.",
        ],
    ),
    (
        "Layout(3)",
        "LayoutError",
        [
            "A layout is a string such as 'b/dp s d', but this is of type int.",
        ],
    ),
    (
        "Pattern(None)",
        "LayoutError",
        [
            "A pattern is a string such as 'b/dp d -> b d', but this is of type NoneType.",
        ],
    ),
    (
        'Layout("b/dp s").resolve({"s": "dp"})',
        "LayoutError",
        [
            '"b/dp s"',
            "      ^",
            "The mapping puts two parts of one layout on the mesh axis 'dp'.",
            "got:",
            "- 'b/dp' as written",
            "- 's' by the rule 's': 'dp'",
        ],
    ),
    (
        'Layout("b s").resolve({"s": "dp", "b": ("tp", "dp")})',
        "LayoutError",
        [
            '"b s"',
            "   ^",
            "The mapping puts two parts of one layout on the mesh axis 'dp'.",
            "got:",
            "- 'b' by the rule 'b': ('tp', 'dp')",
            "- 's' by the rule 's': 'dp'",
        ],
    ),
    (
        'Layout("b {U:tp}").resolve({"b": "tp"})',
        "LayoutError",
        [
            '"b {U:tp}"',
            " ^",
            "The mapping puts two parts of one layout on the mesh axis 'tp'.",
            "got:",
            "- the mark {U:tp}",
            "- 'b' by the rule 'b': 'tp'",
        ],
    ),
    (
        'Layout("(b s)").resolve({"s": "dp"})',
        "LayoutError",
        [
            '"(b s)"',
            "    ^",
            "A composite dimension is divided on its leading factors, but the mapping divides 's' behind the whole factor 'b'.",
            "got:",
            "- 's' by the rule 's': 'dp'",
            "- 'b' whole without a rule",
            "advice: (b s)/1, or a rule that divides 'b' too",
        ],
    ),
    (
        'Pattern("b, x (b s) -> c").resolve({"s": "dp", "b": None})',
        "LayoutError",
        [
            '"b, x (b s) -> c"',
            "         ^",
            "A composite dimension is divided on its leading factors, but the mapping divides 's' behind the whole factor 'b'.",
            "got:",
            "- 's' by the rule 's': 'dp'",
            "- 'b' whole by the rule 'b': None",
            "advice: (b s)/1, or a rule that divides 'b' too",
        ],
    ),
    (
        'Layout("b s/tp {U:cp}").bind(tp="cp")',
        "LayoutError",
        [
            '"b s/tp {U:cp}", read as "b s/cp {U:cp}"',
            "A mesh axis occurs once in a layout, but 'cp' is used in 's/cp' and in {U:cp}.",
        ],
    ),
    (
        'Layout("b/dp s/tp").bind(tp="dp")',
        "LayoutError",
        [
            '"b/dp s/tp", read as "b/dp s/dp"',
            "      ^^^^",
            "A mesh axis occurs once in a layout, but 'dp' is used in 'b/dp' and in 's/dp'.",
        ],
    ),
    (
        'Layout("b/dp").bind(dp=2)',
        "LayoutError",
        [
            "A mesh axis is bound to a name, a tuple of names, or None.",
            "got: dp=2 of type int",
        ],
    ),
    (
        'Layout("(b/dp s/cp)").without("dp")',
        "LayoutError",
        [
            '"(b/dp s/cp)", read as "(b s/cp)"',
            "       ^^^^",
            "A composite dimension is divided on its leading factors, but 's/cp' comes after the whole factor 'b'.",
            "advice: divide 'b' too, or put 's' first: (s b)/cp",
        ],
    ),
    (
        'Layout.from_dims(Layout("b/dp").dims * 2)',
        "LayoutError",
        [
            'the layout "b/dp b/dp"',
            "A name stands for one dimension of a layout, but 'b' occurs twice.",
        ],
    ),
    (
        'Layout.from_dims([Dim((Atom("b c"),))])',
        "LayoutError",
        [
            "Layout.from_dims(...)",
            "'b c' is not a name of a dimension.",
        ],
    ),
    (
        'Layout.from_dims([Dim((Atom("b", ("a b",)),))])',
        "LayoutError",
        [
            "Layout.from_dims(...)",
            "'a b' is not a name of a mesh axis.",
        ],
    ),
    (
        "Layout.from_dims([Dim(())])",
        "LayoutError",
        [
            "Layout.from_dims(...)",
            "Dimension 0 cannot be written in the layout language.",
        ],
    ),
    (
        'Layout.from_dims([Dim((Atom("3", (), 4),))])',
        "LayoutError",
        [
            "Layout.from_dims(...)",
            "'3' is not the literal size 4.",
        ],
    ),
    (
        'Layout("b").prepend("{U:dp}")',
        "LayoutError",
        [
            '.prepend("{U:dp}")',
            "Only dimensions can be prepended, not marks.",
        ],
    ),
    (
        'Layout("b d").axes_of("e")',
        "LayoutError",
        [
            "Layout('b d')",
            "The layout has no dimension 'e'.",
        ],
    ),
    (
        'Layout("batch d").axes_of("bacth")',
        "LayoutError",
        [
            "Layout('batch d')",
            "The layout has no dimension 'bacth'; did you mean 'batch'?",
        ],
    ),
    (
        'Layout("b d").with_rank(3)',
        "SizeError",
        [
            "Layout('b d')",
            '"b d" has 2 dimensions, not 3.',
        ],
    ),
    (
        'Layout("... b d").with_rank(1)',
        "SizeError",
        [
            "Layout('... b d')",
            '"... b d" has at least 2 dimensions, not 1.',
        ],
    ),
    (
        'Layout("... d").spec',
        "LayoutError",
        [
            '"... d"',
            " ^^^",
            "The number of dimensions that '...' stands for is not known here.",
            "advice: .with_rank(n)",
        ],
    ),
    (
        'Pattern("b, ... d -> b").inputs[1].spec',
        "LayoutError",
        [
            '"b, ... d -> b"',
            "    ^^^",
            "The number of dimensions that '...' stands for is not known here.",
            "advice: .with_rank(n)",
        ],
    ),
    (
        'Layout("(a/dp b/tp)").spec',
        "LayoutError",
        [
            '"(a/dp b/tp)"',
            " ^^^^^^^^^^^",
            "'(a/dp b/tp)' has no PartitionSpec: with several divided factors a device holds scattered pieces of the dimension. Inside a kernel this is legal.",
        ],
    ),
    (
        'Layout("1+x/a").spec',
        "LayoutError",
        [
            '"1+x/a"',
            " ^^^^^",
            "A dimension with margins, '1+x/a', has no PartitionSpec: its shards overlap.",
        ],
    ),
    (
        'Layout("d/modle {U:x}").local_shape((3,), {"data": 2, "model": 2})',
        "MeshError",
        [
            "Layout('d/modle {U:x}')",
            "The mesh lacks mesh axes of the layout.",
            "got:",
            "- 'modle'; did you mean 'model'?",
            "- 'x'",
            "- mesh data=2, model=2",
        ],
    ),
    (
        'Layout("d/dp").local_shape((3,), {})',
        "MeshError",
        [
            "Layout('d/dp')",
            "The mesh lacks a mesh axis of the layout.",
            "got:",
            "- 'dp'",
            "- a mesh without axes",
        ],
    ),
    (
        'Layout("b s").local_shape((2, 3, 4), {})',
        "SizeError",
        [
            '"b s" with shape (2, 3, 4)',
            'shape (2, 3, 4): "b s" has 2 dimensions, not 3.',
            "got: a mesh without axes",
        ],
    ),
    (
        'Layout("b/dp s/tp/dq (h k)/x 3").local_shape((3, 6, 8, 4), {"dp": 2, "tp": 4, "dq": 2, "x": 2}, sizes={"h": 1})',
        "SizeError",
        [
            '"b/dp s/tp/dq (h k)/x 3" with shape (3, 6, 8, 4)',
            "The shape does not fit the layout.",
            "got:",
            "- dimension 0: b of size 3 does not divide into the 2 blocks of dp; pad b by 1 to 4",
            (
                "- dimension 1: s of size 6 does not divide into the 8 blocks of tp/dq; pad s by 2 to 8, "
                "or leave it whole: s without /tp/dq"
            ),
            "- dimension 3: the layout says size 3, and the array has 4",
            (
                "- dimension 2: h of size 1 does not divide into the 2 blocks of x; pad h by 1 to 2, "
                "or leave it whole: h without /x"
            ),
            "- mesh dp=2, tp=4, dq=2, x=2",
        ],
    ),
    (
        'Layout("1+x/a+1 3").global_shape((1, 2), {"a": 2})',
        "SizeError",
        [
            '"1+x/a+1 3" with shape (1, 2)',
            "The shape does not fit the layout.",
            "got:",
            "- dimension 0: size 1 is less than the margins 1 and 1 together",
            "- dimension 1: the layout says size 3, and the array has 2",
            "- mesh a=2",
        ],
    ),
    (
        'Layout.of(np.zeros((2, 3)), "b")',
        "LayoutError",
        [
            'Layout.of(x, "b")',
            '"b" has 1 dimension, not 2.',
            "got: shape (2, 3)",
        ],
    ),
    (
        'Layout.of(np.zeros((2, 3)), "b/dp d")',
        "LayoutError",
        [
            'Layout.of(x, "b/dp d")',
            "Layout.of reads the mesh axes; give it names only.",
            'fix: "b d"',
        ],
    ),
    (
        'AxisMapping({"a": ("b", "b")})',
        "LayoutError",
        [
            "AxisMapping(...)",
            "A rule divides over each mesh axis once, but 'b' occurs twice.",
            "got: 'a': ('b', 'b')",
        ],
    ),
    (
        'AxisMapping({"a": 3})',
        "LayoutError",
        [
            "AxisMapping(...)",
            "A rule says a mesh axis, a tuple of mesh axes (major first), or None for whole.",
            "got: 'a': int",
        ],
    ),
    (
        'AxisMapping({"a": ("b", 3)})',
        "LayoutError",
        [
            "AxisMapping(...)",
            "A rule says a mesh axis, a tuple of mesh axes (major first), or None for whole.",
            "got: 'a': ('b', 3)",
        ],
    ),
    (
        'AxisMapping({3: "a"})',
        "LayoutError",
        [
            "AxisMapping(...)",
            "The keys of a mapping are names of dimensions.",
            "got: 3: 'a'",
        ],
    ),
    (
        'AxisMapping({"scalar": "a"})',
        "LayoutError",
        [
            "AxisMapping(...)",
            "The keys of a mapping are names of dimensions.",
            "got: 'scalar': 'a'",
        ],
    ),
    (
        'AxisMapping({"a": "tpp", "b": ("dp", "x")}).check(("dp", "tp"))',
        "MeshError",
        [
            "AxisMapping({'a': 'tpp', 'b': ('dp', 'x')})",
            "The rules of a mapping name axes of the mesh.",
            "got:",
            "- 'a': 'tpp': no axis 'tpp'; did you mean 'tp'?",
            "- 'b': ('dp', 'x'): no axis 'x'",
            "- mesh axes dp, tp",
        ],
    ),
    (
        'AxisMapping({"mlp": "tp"}).only("mpl")',
        "LayoutError",
        [
            "AxisMapping({'mlp': 'tp'})",
            "The mapping has no rule for 'mpl'; did you mean 'mlp'?",
        ],
    ),
    (
        'AxisMapping.of("mlp")',
        "LayoutError",
        [
            "A mapping is an AxisMapping or a dict, but this is of type str.",
            'advice: as in AxisMapping({"batch": "dp"})',
        ],
    ),
]


@pytest.mark.parametrize(("expression", "kind", "lines"), GOLDEN, ids=[one[0][:60] for one in GOLDEN])
def test_message(expression, kind, lines):
    with pytest.raises(SpmdError) as caught:
        eval(expression, NAMES)
    assert caught.value.args == ("\n".join(lines),)
    assert type(caught.value).__name__ == kind


@pytest.mark.parametrize(("expression", "kind", "lines"), GOLDEN, ids=[one[0][:60] for one in GOLDEN])
def test_carets_stand_under_the_call_also_in_a_traceback(expression, kind, lines):
    with pytest.raises(SpmdError) as caught:
        eval(expression, NAMES)
    has_carets = len(lines) > 1 and set(lines[1]) <= {" ", "^"}
    assert str(caught.value).startswith("\n") == has_carets


def fixes():
    for expression, _, lines in GOLDEN:
        for line in lines:
            if line.startswith("fix: "):
                yield re.split(r"\W", expression)[0], line.removeprefix("fix: ")


def test_each_fix_is_a_string_to_paste_which_parses():
    """With a keyword behind it, which is for the call; what is not a whole string is `advice:`."""
    found = list(fixes())
    assert len(found) > 15
    for make, fix in found:
        text, keywords = eval(f"(lambda text, **keywords: (text, keywords))({fix})")
        made = {"Layout": Layout, "Pattern": lambda text: Pattern(text, arrow="->" in text)}[make](text)
        assert set(keywords) <= set(made.names)
