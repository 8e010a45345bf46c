from trainkit.formats import duration, number, plural, size, table


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


def test_a_duration_has_two_units_at_most():
    shown = [duration(seconds) for seconds in (None, 0, 59.9, 61, 3_600, 90_000)]
    assert shown == ["-", "0s", "59s", "1m01s", "1h00m", "1d01h"]


def test_a_number_has_four_digits_that_matter():
    shown = [number(value) for value in (None, float("nan"), 0.0, 2.54112, 12345.6, 3e-4)]
    assert shown == ["-", "-", "0", "2.541", "12,346", "0.0003"]


def test_amounts_have_their_unit():
    assert [plural(*what) for what in ((1, "node"), (1200, "process"))] == ["1 node", "1,200 processes"]
    assert [size(value) for value in (0, 1023, 1536, 5 * 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 TiB",
    ]
