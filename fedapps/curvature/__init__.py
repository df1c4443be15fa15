"""Second-order mathematics: curvature blocks, local Newton-type steps, and mixing on the server. Knows no Flower.

================  ==============================================================================  ======
module            subject                                                                         torch
================  ==============================================================================  ======
``foof``          FOOF blocks and local steps of a torch model                                    yes
``gram``          a covariance as rows or as matrix, and dividing by it                           yes
``layers``        layer types that have a block, and how to add one                               yes
``convolutions``  rows of convolutions, and their covariance without unfolding                    yes
``blocks``        what a client sends for a block, in every form                                  no
``newton``        full-Hessian steps of a convex model                                            no
``logistic``      L2-regularised logistic regression                                              no
``compressors``   what travels of a symmetric matrix: Top-k, Rank-r                               no
``fednew``        FedNew: a pass of ADMM for the clients' Newton direction                        no
``fednl``         FedNL: a Hessian learned from compressed differences                            no
``layout``        which parameters share a block, and a block as one matrix                       no
``mixing``        preconditioned mixing from running sums                                         no
``packing``       a symmetric matrix as its upper triangle                                        no
``solve``         Cholesky with rising damping                                                    no
================  ==============================================================================  ======

Names are imported from these modules, so that a server that only mixes imports no torch.
"""
