from trainkit.formats import table


def test_columns_are_as_wide_as_their_longest_cell():
    assert table([["A", "B"], ["long", "x"]]) == "A     B\nlong  x"


def test_numbers_are_aligned_on_the_right():
    assert table([["name", "GiB", "why"], ["a", "1.5", "x"]], right=[1]) == "name  GiB  why\na     1.5  x"
    assert table([["a", "1"], ["b", "100"]], right=[1]) == "a    1\nb  100"


def test_a_long_cell_overflows_instead_of_widening_its_column():
    rows = [["a", "x" * 9, "1"], ["b", "y", "2"]]
    assert table(rows, max_width=3) == f"a  {'x' * 9}  1\nb  y    2"


def test_an_empty_last_cell_leaves_no_blanks():
    assert table([["a", "b"], ["c", ""]]) == "a  b\nc"
