"""Start the processes of a run on one machine or several, and restart them.

The room is not called `launch`, because `trainer.launch` is the public function of `notebook.py`.
"""
