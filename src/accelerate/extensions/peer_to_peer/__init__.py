"""GPUs that cannot exchange data directly."""

from accelerate.extension import Spec

SPEC = Spec("peer_to_peer", process="accelerate.extensions.peer_to_peer.gpus:PeerToPeer")
