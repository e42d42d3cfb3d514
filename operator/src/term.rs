//! Until when this replica is certainly the leader; the client of the reconcilers refuses every write after that.
//!
//! A process or machine that was suspended continues where it was, and would otherwise write concurrently with its successor.

use http::{Method, Request};
use kube::client::Body;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tower::filter::FilterLayer;

#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("leadership may have expired; write refused until the Lease is renewed")]
pub(crate) struct LeadershipExpired;

/// Until when this replica is certainly the leader; `None` before the Lease was first held.
#[derive(Clone, Debug, Default)]
pub(crate) struct Term(Arc<Mutex<Option<Instant>>>);

impl Term {
    /// Ends a third of the Lease duration before another replica can acquire it: the time a sent write may take.
    pub(crate) fn renew(&self, certain: Instant, duration: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = certain.checked_sub(duration / 3);
    }

    fn check(&self, now: Instant) -> Result<(), LeadershipExpired> {
        let end = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if end.is_some_and(|end| now < end) { Ok(()) } else { Err(LeadershipExpired) }
    }

    /// A client layer: reads pass, writes only while this replica leads.
    pub(crate) fn guard(
        &self,
    ) -> FilterLayer<
        impl Fn(Request<Body>) -> Result<Request<Body>, LeadershipExpired> + Clone + Send + 'static,
    > {
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
    async fn reads_pass_and_writes_only_while_the_lease_is_held() {
        let term = Term::default();
        let ask = async |method: Method| {
            let server = service_fn(async |_| Ok::<_, tower::BoxError>(Response::new(Body::empty())));
            let request = Request::builder().method(method).body(Body::empty()).unwrap();
            term.guard().layer(server).oneshot(request).await.is_ok()
        };
        let begin = Instant::now();
        assert_eq!((ask(Method::GET).await, ask(Method::PATCH).await), (true, false), "not held yet");
        term.renew(begin + LEASE, LEASE);
        for method in [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            assert!(ask(method).await);
        }
        assert!(term.check(begin + LEASE * 2 / 3).is_err(), "before another replica can acquire it");
        term.renew(begin, LEASE);
        assert_eq!((ask(Method::GET).await, ask(Method::DELETE).await), (true, false), "expired");
    }
}
