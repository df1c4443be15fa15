"""What travels: one file a subject, in which what packs a message stands beside what unpacks it.

=================  ================================================================================
module             subject
=================  ================================================================================
``schema``         names of records, packing, unpacking and checks that all methods share
``blocks``         FedPM's reply: curvature blocks and products
``hessians``       FedNL: what a reply says of a client's Hessian
``line_search``    the second exchange of LocalNewton and FedNL
``plans``          FedCLUP: a client's part in a round
``scalars``        scalar-only methods: slices of the journal, scalars, fingerprints
``node_facts``     what a node says of itself in the handshake
=================  ================================================================================
"""

from fedapps.messages.schema import Arrays, Records, Reply, pack, pack_arrays, unpack, unpack_arrays

__all__ = ["Arrays", "Records", "Reply", "pack", "pack_arrays", "unpack", "unpack_arrays"]
