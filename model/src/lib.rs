//! The vocabulary of gpu-migrate: resources, cards, ledger, topology, placement, custom resources. Pure.
