//! A network in which pods reach the API server, and kubelet and API server reach pods: for scenarios whose programs run in
//! their pods. All others have pods without any interface.
//!
//! CNI's own plugins make it (`ptp`: a pair of interfaces for each pod). kube-proxy is left out: it would have nothing to
//! forward to, since an API server on loopback publishes no endpoint of the one Service that our pods call. That Service's address is
//! an address of this machine instead, with a forwarder behind it.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use crate::{cluster::Cluster, configs::API_SERVICE, process::output};

/// Before `10-it.conflist` in the order of names: containerd takes the first.
const CONFIG: &str = "cni/conf/05-pods.conflist";

/// `ptp` turns it on, for the whole machine.
const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";

/// While it lives, the API server answers at its Service's address.
#[derive(Debug)]
pub struct PodNetwork {
    forwarder: JoinHandle<()>,
    /// What [`FORWARDING`] was before.
    forwarding: String,
}

impl Drop for PodNetwork {
    fn drop(&mut self) {
        self.forwarder.abort();
        let _ = address("del");
        let _ = std::fs::write(FORWARDING, &self.forwarding);
    }
}

impl Cluster {
    /// Pods that start from now on have an interface. [`Cluster::disconnect_pods`] ends it.
    pub async fn connect_pods(&mut self) -> Result<PodNetwork> {
        let forwarding = std::fs::read_to_string(FORWARDING)?;
        // One that a crashed run left.
        let _ = address("del");
        address("add")?;
        let listener = TcpListener::bind((API_SERVICE, 443))
            .await
            .context("cannot listen at the API server's Service")?;
        let port = self.setup.ports.apiserver;
        let forwarder = tokio::spawn(async move {
            while let Ok((mut pod, _)) = listener.accept().await {
                tokio::spawn(async move {
                    if let Ok(mut apiserver) = TcpStream::connect(("127.0.0.1", port)).await {
                        // Either side may end it at any time.
                        let _ = tokio::io::copy_bidirectional(&mut pod, &mut apiserver).await;
                    }
                });
            }
        });
        let network = PodNetwork { forwarder, forwarding };
        let ipam = json!({
            "type": "host-local", "dataDir": self.setup.layout.file("cni/addresses"),
            "subnet": "10.77.0.0/24", "routes": [{"dst": "0.0.0.0/0"}],
        });
        let config =
            json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]});
        self.setup.layout.write(CONFIG, config.to_string())?;
        self.reread_network().await?;
        Ok(network)
    }

    /// Pods that start from now on have no interface again. None of those with one may be left.
    pub async fn disconnect_pods(&mut self, network: PodNetwork) -> Result<()> {
        drop(network);
        std::fs::remove_file(self.setup.layout.file(CONFIG)).context("cannot remove the pod network")?;
        self.reread_network().await
    }

    /// containerd also notices changes by itself, but does not say when.
    async fn reread_network(&mut self) -> Result<()> {
        self.restart("containerd")?;
        self.containerd_serves("containerd").await
    }
}

/// Adds or removes the Service's address.
fn address(verb: &str) -> Result<()> {
    let address = format!("{API_SERVICE}/32");
    output(Command::new("ip").args(["address", verb, &address, "dev", "lo"])).map(drop)
}
