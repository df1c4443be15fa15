"""Personalised-learning mathematics: proximal objectives, FedCLUP, its relatives and its theory. Knows no Flower.

`proximal` holds the objective that all methods share, in NumPy, and `torch_proximal` the same for torch modules; one file
a method (`fedclup`, `pfedme`, `ditto`); `choose_lambda` sets the dial between local and global; `quadratic` and
`synthetic` make problems whose answer is known; `theory` predicts rates and rounds.

LocalTrain is `proximal.descend` on a client's own objective from its own last model, without an anchor. GlobalTrain is
FedAvg: every client runs `proximal.descend` from the model received, and the server takes the mean.
"""
