//! The accept loop: TLS or plain, HTTP/2 or HTTP/1.1, with time limits, a connection cap and a graceful drain.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time; more wait in the kernel's backlog.
    pub connections: usize,
    /// From accept to the end of the TLS handshake.
    pub handshake: Duration,
    /// For the headers of a request, and so also the longest idle time between two requests. Above the 90 s after
    /// which Go clients close idle connections, so that a server's close never meets a request on its way.
    pub headers: Duration,
    /// For connections to finish once the server stops; then they are cut.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(100),
            drain: Duration::from_secs(15),
        }
    }
}

/// Serves until `stop`, then finishes what is in flight within [`Limits::drain`].
///
/// `service` is a hyper service; a tower one (an axum router) goes through
/// [`hyper_util::service::TowerToHyperService`]. With `tls` the protocol is what ALPN agreed on; without it, HTTP/1.1.
pub async fn serve<S, B>(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    service: S,
    limits: Limits,
    stop: CancellationToken,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let slots = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let acceptor = tls.map(TlsAcceptor::from);
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accept(&listener, &slots) => accepted,
        };
        let Some((stream, slot)) = accepted else { continue };
        let (acceptor, service, watcher) = (acceptor.clone(), service.clone(), graceful.watcher());
        tokio::spawn(async move {
            match acceptor {
                None => http1_connection(stream, service, limits, watcher).await,
                Some(acceptor) => tls_connection(stream, &acceptor, service, limits, watcher).await,
            }
            drop(slot);
        });
    }
    drop(listener);
    let open = graceful.count();
    if tokio::time::timeout(limits.drain, graceful.shutdown()).await.is_err() {
        tracing::warn!(open, "connections cut after the drain limit");
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, slot))
        }
        Err(error) => {
            // Out of file descriptors, most likely: give connections time to end.
            tracing::warn!(%error, "cannot accept a connection");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

async fn tls_connection<S, B>(
    stream: TcpStream,
    acceptor: &TlsAcceptor,
    service: S,
    limits: Limits,
    watcher: Watcher,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream = match tokio::time::timeout(limits.handshake, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return http1_connection(stream, service, limits, watcher).await;
    }
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).keep_alive_interval(limits.headers / 3).max_concurrent_streams(256);
    let connection = watcher.watch(builder.serve_connection(TokioIo::new(stream), service));
    end(connection).await;
}

async fn http1_connection<I, S, B>(io: I, service: S, limits: Limits, watcher: Watcher)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.headers);
    end(watcher.watch(builder.serve_connection(TokioIo::new(io), service))).await;
}

async fn end(connection: impl Future<Output = Result<(), hyper::Error>>) {
    if let Err(error) = connection.await {
        tracing::debug!(%error, "connection");
    }
}
