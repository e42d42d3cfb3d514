//! gRPC over unix sockets: bind, dial, serve. The same over any other stream of bytes, for tests.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint, Error, Server};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A socket could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve {path}: {source}; its directory must exist and be writable")]
pub struct BindError {
    pub path: PathBuf,
    pub source: std::io::Error,
}

/// Binds a fresh socket that only root may use, replacing a stale one.
///
/// # Errors
/// [`BindError`].
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let bind = || {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    bind().map_err(|source| BindError { path: path.to_path_buf(), source })
}

/// Serves until `stop`.
///
/// # Errors
/// The transport's.
pub async fn serve(listener: UnixListener, routes: Routes, stop: CancellationToken) -> Result<(), Error> {
    let incoming = UnixListenerStream::new(listener);
    Server::builder().add_routes(routes).serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await
}

/// A channel to a unix socket.
///
/// # Errors
/// The transport's.
pub async fn dial(socket: &Path) -> Result<Channel, Error> {
    let socket = socket.to_path_buf();
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    endpoint().connect_timeout(CONNECT_TIMEOUT).connect_with_connector(connect).await
}

/// Serves one connection, to its end.
///
/// # Errors
/// The transport's.
pub async fn serve_stream<S>(stream: S, routes: Routes) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite + tonic::transport::server::Connected + Unpin + Send + 'static,
{
    let incoming = tokio_stream::once(Ok::<_, std::io::Error>(stream));
    Server::builder().add_routes(routes).serve_with_incoming(incoming).await
}

/// A channel over one connection; `None` is a connection refused.
///
/// # Errors
/// The transport's.
pub async fn dial_stream<S>(stream: Option<S>) -> Result<Channel, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut stream = stream.map(TokioIo::new);
    let connect = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.ok_or(std::io::ErrorKind::ConnectionRefused).map_err(std::io::Error::from) }
    });
    endpoint().connect_with_connector(connect).await
}

/// The URI only fills `:authority`; the connector decides where to go.
fn endpoint() -> Endpoint {
    Endpoint::from_static("http://localhost")
}
