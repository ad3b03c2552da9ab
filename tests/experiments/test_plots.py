"""Pictures of the reports: names at lines, rows of dots, and what is said of them."""

from perdl_experiments import plots


def test_lines_in_one_column_are_named_at_their_ends_and_side_by_side_in_a_legend():
    drawings = [plots.Panel("x", "y", [1, 2], {"a": [1, 2], "b": [2, 1]})] * 2
    below, beside = plots.panels(drawings, columns=1), plots.panels(drawings)
    assert [[text.get_text() for text in axes.texts] for axes in below.axes] == [["a", "b"]] * 2
    assert (len(below.legends), len(beside.legends)) == (0, 1)


def test_dots_of_several_groups_lie_apart_in_their_row_and_panels_are_described():
    panels = {"left": {"a": [[1, 2], [3]], "b": [[1], [2]]}, "right": {"a": [[1], []]}}
    figure = plots.dots(panels, ["one", "two"], x="error")
    a, b = figure.axes[0].get_lines()
    assert a.get_xdata().tolist() == [1, 2, 3]
    assert not set(a.get_ydata()) & set(b.get_ydata())
    assert abs(a.get_ydata() - [0, 0, 1]).max() < 0.5
    said = "left, error: a between 1 and 3; b between 1 and 2. right, error: a at 1."
    assert plots.describe(figure) == said
