//! How long this replica surely leads, held against every write at the moment it is sent.
//!
//! The loops need not think of it: the client that they write with refuses. A process that stood still, or a machine that
//! was suspended, goes on where it was, and would write for a moment beside its successor.

use http::{Method, Request};
use kube::client::Body;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tower::filter::FilterLayer;

/// Why a write was not sent.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the Lease is not certainly ours any more: nothing is written until it is renewed")]
pub(crate) struct Over;

/// Until when we surely lead; not at all before the Lease was ours.
#[derive(Clone, Debug, Default)]
pub(crate) struct Term(Arc<Mutex<Option<Instant>>>);

impl Term {
    /// Ends a third of the Lease's duration before another can take it: so long may a write that was sent be under way.
    pub(crate) fn renew(&self, certain: Instant, duration: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = certain.checked_sub(duration / 3);
    }

    fn check(&self, now: Instant) -> Result<(), Over> {
        let end = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if end.is_some_and(|end| now < end) { Ok(()) } else { Err(Over) }
    }

    /// A layer for a client: reads pass, writes only while we lead.
    pub(crate) fn guard(
        &self,
    ) -> FilterLayer<impl Fn(Request<Body>) -> Result<Request<Body>, Over> + Clone + Send + 'static> {
        let term = self.clone();
        FilterLayer::new(move |request: Request<Body>| {
            if request.method() != Method::GET {
                term.check(Instant::now())?;
            }
            Ok(request)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Response;
    use tower::{Layer as _, ServiceExt as _, service_fn};

    const LEASE: Duration = Duration::from_secs(15);

    #[tokio::test]
    async fn reads_pass_and_writes_only_while_the_lease_is_certainly_ours() {
        let term = Term::default();
        let ask = async |method: Method| {
            let server = service_fn(async |_| Ok::<_, tower::BoxError>(Response::new(Body::empty())));
            let request = Request::builder().method(method).body(Body::empty()).unwrap();
            term.guard().layer(server).oneshot(request).await.is_ok()
        };
        let begin = Instant::now();
        assert_eq!((ask(Method::GET).await, ask(Method::PATCH).await), (true, false), "not ours yet");
        term.renew(begin + LEASE, LEASE);
        for method in [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            assert!(ask(method).await);
        }
        assert!(term.check(begin + LEASE * 2 / 3).is_err(), "before anybody else can take it");
        term.renew(begin, LEASE);
        assert_eq!((ask(Method::GET).await, ask(Method::DELETE).await), (true, false), "it has run out");
    }
}
