//! The accept loop: TLS or plain, HTTP/2 or HTTP/1.1, with time limits, limits on connections and a graceful drain.

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::MissedTickBehavior;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::connections::{Connection, Connections, Observed, Reason};
pub use crate::connections::{ConnectionMetrics, Peer};

#[derive(Clone, Debug)]
pub struct Limits {
    /// Open connections. For one more, that which has been idle longest is closed.
    pub connections: usize,
    /// The same for one address.
    pub per_peer: usize,
    /// TLS handshakes at a time. For one more, the oldest is given up.
    pub handshakes: usize,
    /// From accept to the end of the TLS handshake.
    pub handshake: Duration,
    /// For the headers of a request, from its first byte (HTTP/1.1).
    pub headers: Duration,
    /// Without a request. Above the 90 s after which Go clients close idle connections, so that a server's close never meets a
    /// request on its way.
    pub idle: Duration,
    /// For connections to finish once the server stops; then they are cut.
    pub drain: Duration,
    pub metrics: ConnectionMetrics,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            per_peer: 512,
            handshakes: 256,
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(5),
            idle: Duration::from_secs(100),
            drain: Duration::from_secs(15),
            metrics: ConnectionMetrics::default(),
        }
    }
}

/// What a connection may hold of a client's bytes before the service asks for them.
const BUFFER: u32 = 64 << 10;

/// Serves until `stop`, then finishes what is in flight within [`Limits::drain`].
///
/// `service` is a hyper service; a tower one (an axum router) goes through
/// [`hyper_util::service::TowerToHyperService`]. Each request has a [`Peer`] among its extensions. With `tls` the protocol is what
/// ALPN agreed on; without it, HTTP/1.1.
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
    let drain = limits.drain;
    let connections = Arc::new(Connections::new(limits));
    let graceful = GracefulShutdown::new();
    let acceptor = tls.map(TlsAcceptor::from);
    let mut sweep = tokio::time::interval(connections.sweep_every());
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            _ = sweep.tick() => {
                connections.sweep(Instant::now());
                continue;
            }
            accepted = accept(&listener) => accepted,
        };
        let Some((stream, peer)) = accepted else { continue };
        let (acceptor, service, watcher) = (acceptor.clone(), service.clone(), graceful.watcher());
        let connections = Arc::clone(&connections);
        let connection = connections.accepted(peer);
        tokio::spawn(async move {
            let served = async {
                match acceptor {
                    None => {
                        connections.opened(&connection);
                        http1_connection(stream, service, &connection, watcher).await;
                    }
                    Some(acceptor) => {
                        tls_connection(stream, &acceptor, service, &connections, &connection, watcher).await;
                    }
                }
            };
            tokio::select! {
                () = connection.closed() => {}
                () = served => {}
            }
            connections.ended(&connection);
        });
    }
    drop(listener);
    let open = graceful.count();
    if tokio::time::timeout(drain, graceful.shutdown()).await.is_err() {
        tracing::warn!(open, "connections cut after the drain limit");
    }
}

async fn accept(listener: &TcpListener) -> Option<(TcpStream, IpAddr)> {
    match listener.accept().await {
        Ok((stream, address)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, address.ip()))
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
    connections: &Connections,
    connection: &Arc<Connection>,
    watcher: Watcher,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream = match acceptor.accept(stream).await {
        Ok(stream) => stream,
        Err(error) => {
            connections.count(Reason::Handshake);
            return tracing::debug!(peer = ?connection.peer(), %error, "TLS handshake");
        }
    };
    connections.opened(connection);
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return http1_connection(stream, service, connection, watcher).await;
    }
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .max_concurrent_streams(256)
        .initial_stream_window_size(BUFFER)
        .initial_connection_window_size(BUFFER);
    let service = counted(service, connection);
    end(watcher.watch(builder.serve_connection(TokioIo::new(stream), service))).await;
}

async fn http1_connection<I, S, B>(io: I, service: S, connection: &Arc<Connection>, watcher: Watcher)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut builder = http1::Builder::new();
    // The sweep has the deadlines: one timer for all connections.
    builder.header_read_timeout(None).max_buf_size(BUFFER as usize);
    let io = TokioIo::new(Observed { io, connection: Arc::clone(connection) });
    end(watcher.watch(builder.serve_connection(io, counted(service, connection)))).await;
}

/// Says to the connection when it has a request, and to the request where it comes from.
fn counted<S, B>(
    service: S,
    connection: &Arc<Connection>,
) -> impl Service<
    Request<Incoming>,
    Response = Response<B>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<B>, Infallible>> + Send + 'static,
> + Send
+ 'static
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + 'static,
{
    let connection = Arc::clone(connection);
    service_fn(move |mut request: Request<Incoming>| {
        let counted = connection.request();
        request.extensions_mut().insert(connection.peer());
        let response = service.call(request);
        async move {
            let response = response.await;
            drop(counted);
            response
        }
    })
}

async fn end(connection: impl Future<Output = Result<(), hyper::Error>>) {
    if let Err(error) = connection.await {
        tracing::debug!(%error, "connection");
    }
}
