//! Replay of a trace in the openb form (Alibaba 2023), as in the experiment of "Beware of Fragmentation" (USENIX ATC '23): pods arrive
//! one by one until they have asked for 130 % of the cluster's cards, none leaves, one that fits nowhere is
//! skipped. How much of the cluster is given out in the end?
//!
//! [`read`] → [`workload`] (who comes, and when) → [`replay`] (one seed, one policy, on a [`fleet`]) → [`experiment`] (all of them) →
//! [`report`] and [`plot`].
//!
//! **Units.** A trace counts compute in thousandths of a card (`gpu_milli`), the model in cores: 1/100. Every `gpu_milli` of the openb traces
//! is a multiple of 10, so that nothing is lost. A value that is not is rounded *up* to the next core, and
//! the report says how many were; 991 to 999 become a whole card, as they would in a cluster. The trace says nothing about card memory,
//! so that pods ask for no blocks here.
//!
//! **Measured** on `openb_pod_list_default`, 1,213 nodes, 6,212 cards, seeds 42 to 51: GPU allocation ratio in percent of capacity when so
//! much has arrived. The published figures are the authors'.
//!
//! | policy | 90 % | 100 % | 130 % | published at 130 % |
//! |---|---|---|---|---|
//! | random | 85.1 | 86.4 | 87.6 ±0.3 | 87.47 |
//! | best-fit | 90.0 | 92.9 | 93.1 ±0.2 | 93.08 |
//! | binpack | 90.0 | 94.4 | 94.6 ±0.1 | – |
//! | fgd | 90.0 | 95.3 | 95.5 ±0.1 | 95.39 |
//! | lookahead | 90.0 | 95.9 | 96.0 ±0.1 | – |
//!
//! As a cluster really is, with pods without cards spread by kube-scheduler and a mix that must be learnt (`--plain-pods spread --mix
//! observed`, seeds 42 to 51, lookahead 42 to 44): best-fit 84.0, binpack 84.8, fgd 86.8, lookahead 95.6.
//!
//! "packing" in the paper is a rule of its own, not gpu-admission's, which is `binpack` here.

pub mod experiment;
pub mod fleet;
pub mod plot;
pub mod read;
pub mod replay;
pub mod report;
pub mod workload;
