//! Which connections a server keeps. None of its clients can take it away from the others: where there are too many, the one that
//! has been idle longest is closed, first of all of the address that has too many itself. A TLS client counts only once its
//! handshake is done, and so, where certificates are demanded, once it is authenticated.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;

use crate::serve::Limits;

/// The address of a client, among the extensions of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// Why the server closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The TLS handshake failed.
    Handshake,
    /// The TLS handshake, or the headers of a request, took too long.
    Slow,
    /// No request came.
    Idle,
    /// There were too many connections or handshakes, and this one had waited longest.
    Full,
    /// Its address had too many connections, and this one had been idle longest.
    Peer,
}

impl Reason {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Slow => "slow",
            Self::Idle => "idle",
            Self::Full => "full",
            Self::Peer => "peer",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Connections of one server.
#[derive(Clone, Debug, Default)]
pub struct ConnectionMetrics {
    open: Gauge,
    closed: Family<ReasonLabel, Counter>,
}

impl ConnectionMetrics {
    /// Registers them; the registry's prefix names the component.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("connections", "Open connections, handshakes included", self.open.clone());
        let help = "Connections that the server closed, by reason";
        registry.register("connections_closed", help, self.closed.clone());
    }

    /// How many were closed for a reason, as the label has it.
    #[must_use]
    pub fn closed(&self, reason: &'static str) -> u64 {
        self.closed.get_or_create(&ReasonLabel { reason }).get()
    }
}

/// What a connection does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Handshake,
    Idle,
    /// Bytes of a request came, and not all its headers.
    Headers,
}

pub(crate) struct Connection {
    id: u64,
    peer: IpAddr,
    start: Instant,
    phase: AtomicU8,
    /// Since when it is in its phase, milliseconds since the server's start.
    since: AtomicU64,
    /// Requests that are being answered.
    requests: AtomicU32,
    close: CancellationToken,
}

impl Connection {
    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
        self.since.store(millis(self.start.elapsed()), Relaxed);
    }

    fn is(&self, phase: Phase) -> bool {
        self.phase.load(Relaxed) == phase as u8
    }

    fn is_busy(&self) -> bool {
        self.requests.load(Relaxed) > 0
    }

    /// Counts a request until what is returned is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> InRequest {
        self.requests.fetch_add(1, Relaxed);
        InRequest(Arc::clone(self))
    }

    pub(crate) fn peer(&self) -> Peer {
        Peer(self.peer)
    }

    /// Returns when the server no longer wants it.
    pub(crate) async fn closed(&self) {
        self.close.cancelled().await;
    }

    /// Why it is to be closed at `now`.
    fn expired(&self, limits: &Limits, now: u64) -> Option<Reason> {
        if self.is_busy() {
            return None;
        }
        let (limit, reason) = if self.is(Phase::Handshake) {
            (limits.handshake, Reason::Slow)
        } else if self.is(Phase::Headers) {
            (limits.headers, Reason::Slow)
        } else {
            (limits.idle, Reason::Idle)
        };
        (now.saturating_sub(self.since.load(Relaxed)) > millis(limit)).then_some(reason)
    }
}

pub(crate) struct InRequest(Arc<Connection>);

impl Drop for InRequest {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Relaxed) == 1 {
            self.0.enter(Phase::Idle);
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The connections of a server.
pub(crate) struct Connections {
    limits: Limits,
    start: Instant,
    all: Mutex<HashMap<u64, Arc<Connection>>>,
    next: AtomicU64,
    /// Closed for want of room, and when that was last logged.
    refused: Mutex<(u64, Option<Instant>)>,
}

/// Between two warnings about connections that were closed for want of room.
const WARN_EVERY: Duration = Duration::from_secs(60);

impl Connections {
    pub(crate) fn new(limits: Limits) -> Self {
        let (all, next, refused) = (Mutex::default(), AtomicU64::new(0), Mutex::default());
        Self { limits, start: Instant::now(), all, next, refused }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client has connected. Of too many handshakes the oldest is given up.
    pub(crate) fn accepted(&self, peer: IpAddr) -> Arc<Connection> {
        let connection = Arc::new(Connection {
            id: self.next.fetch_add(1, Relaxed),
            peer: peer.to_canonical(),
            start: self.start,
            phase: AtomicU8::new(Phase::Handshake as u8),
            since: AtomicU64::new(millis(self.start.elapsed())),
            requests: AtomicU32::new(0),
            close: CancellationToken::new(),
        });
        let mut all = self.lock();
        let handshakes: Vec<&Arc<Connection>> = all.values().filter(|one| one.is(Phase::Handshake)).collect();
        if handshakes.len() >= self.limits.handshakes
            && let Some(oldest) = handshakes.into_iter().min_by_key(|one| one.id).cloned()
        {
            self.drop_connection(&mut all, &oldest, Reason::Full);
        }
        all.insert(connection.id, Arc::clone(&connection));
        self.limits.metrics.open.inc();
        connection
    }

    /// Its handshake is done. Room is made for it; where there is none, because all others are answering requests, it is closed
    /// itself.
    pub(crate) fn opened(&self, connection: &Arc<Connection>) {
        connection.enter(Phase::Idle);
        let mut all = self.lock();
        let others = || all.values().filter(|one| one.id != connection.id && !one.is(Phase::Handshake));
        let of_peer = others().filter(|one| one.peer == connection.peer).count();
        let reason = match () {
            () if of_peer >= self.limits.per_peer => Reason::Peer,
            () if others().count() >= self.limits.connections => Reason::Full,
            () => return,
        };
        let idle = others().filter(|one| !one.is_busy());
        let idle = idle.filter(|one| reason == Reason::Full || one.peer == connection.peer);
        let victim = idle.min_by_key(|one| one.since.load(Relaxed)).unwrap_or(connection);
        let victim = Arc::clone(victim);
        self.drop_connection(&mut all, &victim, reason);
    }

    fn drop_connection(&self, all: &mut HashMap<u64, Arc<Connection>>, one: &Connection, reason: Reason) {
        // Its task ends later; it no longer counts from now on.
        if all.remove(&one.id).is_some() {
            self.limits.metrics.open.dec();
        }
        self.count(reason);
        one.close.cancel();
        if matches!(reason, Reason::Full | Reason::Peer) {
            self.refused.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        }
    }

    pub(crate) fn count(&self, reason: Reason) {
        self.limits.metrics.closed.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }

    /// It has ended by itself.
    pub(crate) fn ended(&self, connection: &Connection) {
        if self.lock().remove(&connection.id).is_some() {
            self.limits.metrics.open.dec();
        }
    }

    /// Closes what has waited too long; to be called every [`Connections::sweep_every`].
    pub(crate) fn sweep(&self, now: Instant) {
        let elapsed = millis(now.duration_since(self.start));
        let mut all = self.lock();
        let expired: Vec<_> = all
            .values()
            .filter_map(|one| one.expired(&self.limits, elapsed).map(|reason| (Arc::clone(one), reason)))
            .collect();
        for (connection, reason) in expired {
            self.drop_connection(&mut all, &connection, reason);
        }
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.0 > 0 && refused.1.is_none_or(|last| now.duration_since(last) >= WARN_EVERY) {
            let mut of_peers: HashMap<IpAddr, usize> = HashMap::new();
            all.values().for_each(|one| *of_peers.entry(one.peer).or_default() += 1);
            let most = of_peers.into_iter().max_by_key(|(_, count)| *count);
            let (peer, of_peer) = most.map_or((None, 0), |(peer, count)| (Some(peer), count));
            tracing::warn!(
                closed = refused.0,
                open = all.len(),
                ?peer,
                of_peer,
                "too many connections: those that were idle longest were closed; peer has the most"
            );
            *refused = (0, Some(now));
        }
    }

    /// Fine enough for the shortest limit.
    pub(crate) fn sweep_every(&self) -> Duration {
        let Limits { handshake, headers, idle, .. } = self.limits;
        (handshake.min(headers).min(idle) / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }
}

/// The stream of an HTTP/1.1 connection: notices the first byte of a request.
pub(crate) struct Observed<I> {
    pub(crate) io: I,
    pub(crate) connection: Arc<Connection>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Observed<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(context, buffer);
        if buffer.filled().len() > before && !self.connection.is_busy() && self.connection.is(Phase::Idle) {
            self.connection.enter(Phase::Headers);
        }
        polled
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Observed<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(limits: Limits) -> Connections {
        Connections::new(limits)
    }

    fn limits() -> Limits {
        Limits { connections: 6, per_peer: 3, handshakes: 2, ..Limits::default() }
    }

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn open(table: &Connections, peer: u8, since: u64) -> Arc<Connection> {
        let connection = table.accepted(address(peer));
        table.opened(&connection);
        connection.since.store(since, Relaxed);
        connection
    }

    fn is_open(connection: &Connection) -> bool {
        !connection.close.is_cancelled()
    }

    #[test]
    fn one_address_cannot_take_the_connections_of_another() {
        let table = connections(limits());
        let caller = open(&table, 1, 0);
        let held: Vec<_> = (0..100).map(|i| open(&table, 2, 10 + i)).collect();
        assert!(is_open(&caller), "the oldest of all, but of another address");
        assert_eq!(held.iter().filter(|one| is_open(one)).count(), 3);
        assert!(held[97..].iter().all(|one| is_open(one)), "the newest stay");
        let second = open(&table, 1, 500);
        assert!(is_open(&second) && is_open(&caller));
        assert_eq!(table.limits.metrics.closed("peer"), 97);
    }

    #[test]
    fn of_too_many_the_one_that_was_idle_longest_goes_and_never_one_that_is_answered() {
        let table = connections(limits());
        let all: Vec<_> = (1..=6).map(|peer| open(&table, peer, 100 - u64::from(peer))).collect();
        let request = all[5].request();
        let newest = open(&table, 9, 200);
        assert!(is_open(&newest) && is_open(&all[5]), "peer 6 has waited longest, but is answered");
        assert!(!is_open(&all[4]), "then peer 5");
        let busy: Vec<_> = all.iter().chain([&newest]).map(Connection::request_of).collect();
        let late = open(&table, 10, 300);
        assert!(!is_open(&late), "all others are answered: the new one has to wait");
        drop((busy, request));
        assert!(is_open(&open(&table, 10, 300)));
        assert_eq!(table.limits.metrics.closed("full"), 3);
    }

    impl Connection {
        fn request_of(this: &Arc<Self>) -> InRequest {
            this.request()
        }
    }

    #[test]
    fn handshakes_count_apart_and_the_oldest_is_given_up() {
        let table = connections(limits());
        let caller = open(&table, 1, 0);
        let shaking: Vec<_> = (0..10).map(|_| table.accepted(address(2))).collect();
        assert!(is_open(&caller), "who has not shaken hands closes nothing that is open");
        assert_eq!(shaking.iter().filter(|one| is_open(one)).count(), 2);
        assert!(is_open(&shaking[8]) && is_open(&shaking[9]));
        table.opened(&shaking[9]);
        assert!(is_open(&shaking[9]));
    }

    #[test]
    fn each_phase_has_its_own_limit() {
        let table = connections(Limits {
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(5),
            idle: Duration::from_secs(100),
            ..Limits::default()
        });
        let at = |seconds| table.start + Duration::from_secs(seconds);
        let shaking = table.accepted(address(1));
        let [idle, dribbling, answered] = [2, 3, 4].map(|peer| open(&table, peer, 0));
        dribbling.enter(Phase::Headers);
        let request = answered.request();
        for one in [&shaking, &dribbling] {
            one.since.store(0, Relaxed);
        }
        table.sweep(at(5));
        assert!([&shaking, &idle, &dribbling, &answered].iter().all(|one| is_open(one)));
        table.sweep(at(6));
        assert_eq!(
            [&shaking, &idle, &dribbling, &answered].map(|one| is_open(one)),
            [true, true, false, true]
        );
        table.sweep(at(11));
        assert_eq!([&shaking, &idle, &answered].map(|one| is_open(one)), [false, true, true]);
        table.sweep(at(101));
        assert_eq!(
            [&idle, &answered].map(|one| is_open(one)),
            [false, true],
            "the program limits its own answers"
        );
        drop(request);
        assert_eq!(table.limits.metrics.open.get(), 1);
        table.ended(&answered);
        assert_eq!(table.limits.metrics.open.get(), 0);
    }
}
