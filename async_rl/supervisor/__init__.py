"""`async-rl train`: starts every service of a run here, restarts workers that die, stops all in order.

roster.py      which processes a run has, and their environment (pure)
verdict.py     what the end of a process means for the run (pure)
children.py    starting, watching and stopping processes
supervisor.py  the loop
report.py      the live line and the table at the end
"""
