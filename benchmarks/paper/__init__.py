"""Sol-RL's tables on the miniatures: runs, their costs at true shapes, intervals, and one page."""
