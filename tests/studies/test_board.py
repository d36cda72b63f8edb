"""The ranking of eviction policies."""

from experiments.studies import board

HITS = {"none": (0.2, 0.3), "mine": (0.2, 0.2), "arc": (0.3, 0.3), "oracle": (0.4, 0.5)}
BOARD = {
    "chat 48": {
        name: [{**dict.fromkeys(board.KEPT, 1.0), board.HITS: hit, "overloaded": 0} for hit in hits]
        for name, hits in HITS.items()
    }
}


def test_policies_are_ranked_by_gain_over_lru_and_share_of_the_oracles_gain() -> None:
    rows = [[cell.strip() for cell in line.split("|")] for line in board.table(BOARD).splitlines()]
    assert [row[2:7] for row in rows[2:]] == [
        ["", "oracle", "0.450", "+0.200 (+0.200 to +0.200)", "100%"],
        ["1", "arc", "0.300", "+0.050 (+0.000 to +0.100)", "25%"],
        ["2", "none", "0.250", "+0.000 (+0.000 to +0.000)", "0%"],
        ["3", "mine", "0.200", "-0.050 (-0.100 to +0.000)", "-25%"],
    ]
    (axes,) = board.figure(BOARD).axes
    assert [text.get_text() for text in axes.texts] == ["-5.0", "+5.0", "+20.0"]
