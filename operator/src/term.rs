//! How long this replica surely leads: asked before each round, and looked at before each write.
//!
//! The keeper of the Lease tells in its own time that it was lost. A process that stood still, or a machine that slept, goes
//! on where it was, and would write for a moment beside its successor.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::{Api, Client};
use std::time::{Duration, Instant};

/// Our Lease.
pub(crate) struct Term {
    leases: Api<Lease>,
    name: &'static str,
    identity: String,
}

impl Term {
    pub(crate) fn new(client: Client, namespace: &str, name: &'static str, identity: String) -> Self {
        Self { leases: Api::namespaced(client, namespace), name, identity }
    }

    /// Until when nobody else can lead; `None` if we do not.
    pub(crate) async fn ends(&self) -> kube::Result<Option<Instant>> {
        // Before the question, so that the time of the answer counts against us.
        let (asked, now) = (Instant::now(), jiff::Timestamp::now());
        let spec = self.leases.get(self.name).await?.spec.unwrap_or_default();
        Ok(left(&spec, &self.identity, now).map(|left| asked + left))
    }
}

/// What is left of a Lease that is ours.
fn left(spec: &LeaseSpec, identity: &str, now: jiff::Timestamp) -> Option<Duration> {
    if spec.holder_identity.as_deref() != Some(identity) {
        return None;
    }
    let end =
        spec.renew_time.as_ref()?.0 + jiff::SignedDuration::from_secs(spec.lease_duration_seconds?.into());
    Duration::try_from(end.duration_since(now)).ok().filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    #[test]
    fn a_term_is_what_is_left_of_our_own_lease() {
        let at = |second: i64| jiff::Timestamp::from_second(second).unwrap();
        let lease = LeaseSpec {
            holder_identity: Some("a".into()),
            renew_time: Some(MicroTime(at(100))),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        };
        assert_eq!(left(&lease, "a", at(105)), Some(Duration::from_secs(10)));
        assert_eq!(left(&lease, "b", at(105)), None, "somebody else's");
        assert_eq!(left(&lease, "a", at(115)), None, "it has run out");
        assert_eq!(left(&lease, "a", at(200)), None, "long ago, as after a sleep");
        assert_eq!(left(&LeaseSpec::default(), "a", at(105)), None);
    }
}
