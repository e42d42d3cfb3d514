//! Node agent: one ledger, two device plugins, between the kubelet and the NVIDIA plugin.
