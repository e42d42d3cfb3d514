//! Who of several replicas may rotate: a Lease, taken only while there is something to do.
//!
//! Writes are also guarded by the Secret's resource version; the Lease keeps replicas from racing in the first place.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};

use crate::CertError;

/// How long a Lease is ours without renewal, seconds.
const HELD_SECONDS: i32 = 60;

/// What to do about a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It is ours, or free, or its holder is gone: write our name into it.
    Take,
    /// Someone else has it.
    Leave,
}

/// Decides by what is in the Lease. A holder is gone when it has not renewed for twice the duration, which tolerates
/// clocks that differ by the duration.
#[must_use]
pub fn decide(spec: Option<&LeaseSpec>, identity: &str, now: Timestamp) -> Claim {
    let Some(spec) = spec else { return Claim::Take };
    let holder = spec.holder_identity.as_deref().unwrap_or("");
    if holder.is_empty() || holder == identity {
        return Claim::Take;
    }
    let Some(renewed) = &spec.renew_time else { return Claim::Take };
    let held = i64::from(spec.lease_duration_seconds.unwrap_or(HELD_SECONDS));
    if now.duration_since(renewed.0).as_secs() > 2 * held { Claim::Take } else { Claim::Leave }
}

/// Tries to get the Lease; false when someone else has it or won the race.
pub(crate) async fn try_hold(
    api: &Api<Lease>,
    name: &str,
    identity: &str,
    now: Timestamp,
) -> Result<bool, CertError> {
    let failed = |e| CertError::api(format!("Lease {name}"), e);
    let spec = LeaseSpec {
        holder_identity: Some(identity.into()),
        lease_duration_seconds: Some(HELD_SECONDS),
        renew_time: Some(MicroTime(now)),
        ..LeaseSpec::default()
    };
    let metadata = ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() };
    let Some(current) = api.get_opt(name).await.map_err(failed)? else {
        let lease = Lease { metadata, spec: Some(spec) };
        return won(api.create(&PostParams::default(), &lease).await).map_err(failed);
    };
    if decide(current.spec.as_ref(), identity, now) == Claim::Leave {
        return Ok(false);
    }
    let patch = serde_json::json!({ "metadata": { "resourceVersion": current.metadata.resource_version }, "spec": spec });
    won(api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await).map_err(failed)
}

/// Conflict and AlreadyExists mean that someone else was first: no error, but not ours.
pub(crate) fn won<T>(result: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_when_free_ours_or_abandoned() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let lease = |holder: &str, ago: i64| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(60),
            renew_time: Some(MicroTime(Timestamp::from_second(1_800_000_000 - ago).unwrap())),
            ..LeaseSpec::default()
        };
        assert_eq!(decide(None, "a", now), Claim::Take);
        for (holder, ago, expected) in [
            ("", 0, Claim::Take),
            ("a", 0, Claim::Take),
            ("b", 0, Claim::Leave),
            ("b", 120, Claim::Leave),
            ("b", 121, Claim::Take),
            ("b", -30, Claim::Leave),
        ] {
            assert_eq!(
                decide(Some(&lease(holder, ago)), "a", now),
                expected,
                "{holder:?} renewed {ago} s ago"
            );
        }
    }
}
