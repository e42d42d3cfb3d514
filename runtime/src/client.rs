//! The way to the API server.

use std::path::{Path, PathBuf};

use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig, named or found by default, cannot be used.
    #[error("kubeconfig {}: {source}", path.as_deref().unwrap_or(Path::new("$KUBECONFIG")).display())]
    Kubeconfig {
        /// The file; `None` for that of `$KUBECONFIG` or the home directory.
        path: Option<PathBuf>,
        source: KubeconfigError,
    },
    /// Neither a kubeconfig nor a service account was found.
    #[error("no cluster: set --kubeconfig, or run as a pod: {0}")]
    NotFound(InferConfigError),
    /// What was read does not make a client.
    #[error("the connection to the API server cannot be set up: {0}")]
    Client(kube::Error),
}

/// Reads how to reach the API server: from `kubeconfig`, else from `$KUBECONFIG`, `~/.kube/config` or the pod's service
/// account. With `context`, that one of the kubeconfig.
///
/// # Errors
/// [`ConnectError`], which names the file.
pub async fn config(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Config, ConnectError> {
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    let unusable = |source| ConnectError::Kubeconfig { path: kubeconfig.map(Path::to_owned), source };
    match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(unusable)?;
            Config::from_custom_kubeconfig(file, &options).await.map_err(unusable)
        }
        None if context.is_some() => Config::from_kubeconfig(&options).await.map_err(unusable),
        None => Config::infer().await.map_err(ConnectError::NotFound),
    }
}

/// A client for the cluster that [`config`] finds.
///
/// # Errors
/// [`ConnectError`].
pub async fn connect(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client, ConnectError> {
    Client::try_from(config(kubeconfig, context).await?).map_err(ConnectError::Client)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_unusable_kubeconfig_is_named() {
        let path = Path::new("/nowhere/config");
        let error = config(Some(path), None).await.unwrap_err().to_string();
        assert!(error.starts_with("kubeconfig /nowhere/config: "), "{error}");
    }
}
