//! The CAs of one service and the steps of replacing one by the next. Pure; the time is handed in.
//!
//! A verifier must know a CA before that CA signs, so a rotation takes three steps, each a write of the whole keyring:
//! *announce* (make the next CA and put it into the bundle), *promote* (sign with it, once every client had time to read
//! the bundle), *forget* (drop the old CA from the bundle when no certificate of it is in use any more).
//!
//! Where the keyring was deleted, to be rid of a CA at once, the next one signs from the start; the old one stays in the bundle for as
//! long, and servers keep their certificates of it until every client had time to read the bundle.

use std::collections::BTreeMap;

use jiff::Timestamp;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::authority::{Ca, Validity};
use crate::{CertError, Lifetimes};

/// CA certificates as PEM, the one that signs first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bundle(pub String);

impl Bundle {
    /// The certificates in it; text that is no certificate is left out.
    #[must_use]
    pub fn certificates(&self) -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_slice_iter(self.0.as_bytes()).filter_map(Result::ok).collect()
    }
}

#[derive(Debug)]
pub struct Keyring {
    signing: Ca,
    next: Option<Ca>,
    retired: Vec<Retired>,
}

#[derive(Debug)]
struct Retired {
    pem: String,
    validity: Validity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the next CA and put it into the bundle.
    Announce,
    /// Sign with the next CA from now on.
    Promote,
    /// Drop the CAs that have signed before from the bundle.
    Forget,
}

/// Names of the entries of a keyring in a Secret or folder.
pub mod entry {
    /// The bundle.
    pub const BUNDLE: &str = "ca.crt";
    /// The signing CA and its key.
    pub const SIGNING: (&str, &str) = ("signing.crt", "signing.key");
    /// The announced CA and its key.
    pub const NEXT: (&str, &str) = ("next.crt", "next.key");
    /// All of them.
    pub const ALL: [&str; 5] = [BUNDLE, SIGNING.0, SIGNING.1, NEXT.0, NEXT.1];
}

impl Keyring {
    /// The first keyring of a service.
    ///
    /// # Errors
    /// As [`Ca::generate`].
    pub fn generate(owner: &str, now: Timestamp, lifetimes: &Lifetimes) -> Result<Self, CertError> {
        Ok(Self { signing: Ca::generate(owner, now, lifetimes)?, next: None, retired: Vec::new() })
    }

    /// What follows a keyring that was deleted: `bundle` is what clients trust now.
    ///
    /// # Errors
    /// As [`Ca::generate`].
    pub fn successor(
        bundle: Option<&Bundle>,
        owner: &str,
        now: Timestamp,
        lifetimes: &Lifetimes,
    ) -> Result<Self, CertError> {
        let keyring = Self::generate(owner, now, lifetimes)?;
        match bundle {
            Some(bundle) => keyring.with_retired("the CA bundle in use", bundle),
            None => Ok(keyring),
        }
    }

    /// With the other CAs of a bundle, which have signed before; `origin` is where it is from.
    fn with_retired(mut self, origin: &str, bundle: &Bundle) -> Result<Self, CertError> {
        for certificate in bundle.certificates() {
            if self.knows(&certificate) {
                continue;
            }
            let validity = Validity::of(&certificate).map_err(|why| CertError::Unusable {
                origin: origin.into(),
                what: entry::BUNDLE.into(),
                why,
            })?;
            self.retired.push(Retired { pem: to_pem(&certificate), validity });
        }
        Ok(self)
    }

    /// Whether a CA is in the bundle.
    #[must_use]
    pub fn knows(&self, ca: &CertificateDer<'_>) -> bool {
        self.bundle().certificates().contains(ca)
    }

    /// Whether every client had time to read the bundle since the signing CA is in it.
    #[must_use]
    pub fn settled(&self, now: Timestamp, lifetimes: &Lifetimes) -> bool {
        is_settled(&self.signing, now, lifetimes)
    }

    #[must_use]
    pub fn signing(&self) -> &Ca {
        &self.signing
    }

    /// The step that is due, if any.
    #[must_use]
    pub fn due(&self, now: Timestamp, lifetimes: &Lifetimes) -> Option<Step> {
        if self.retired.iter().any(|ca| self.is_unused(ca, now, lifetimes)) {
            return Some(Step::Forget);
        }
        match &self.next {
            None => self.signing.validity().due(now).then_some(Step::Announce),
            Some(next) => (is_settled(next, now, lifetimes) || !self.signing.validity().contains(now))
                .then_some(Step::Promote),
        }
    }

    /// Takes a step.
    ///
    /// # Errors
    /// As [`Ca::generate`].
    pub fn take(
        self,
        step: Step,
        owner: &str,
        now: Timestamp,
        lifetimes: &Lifetimes,
    ) -> Result<Self, CertError> {
        let Self { signing, next, mut retired } = self;
        Ok(match (step, next) {
            (Step::Announce, None) => {
                Self { signing, next: Some(Ca::generate(owner, now, lifetimes)?), retired }
            }
            (Step::Promote, Some(next)) => {
                retired.push(Retired { pem: signing.pem().to_owned(), validity: signing.validity() });
                Self { signing: next, next: None, retired }
            }
            (Step::Forget, next) => {
                let mut keyring = Self { signing, next, retired: Vec::new() };
                retired.retain(|ca| !keyring.is_unused(ca, now, lifetimes));
                keyring.retired = retired;
                keyring
            }
            (Step::Announce | Step::Promote, next) => Self { signing, next, retired },
        })
    }

    /// Whether no serving certificate of a CA that has signed before can be in use: it has expired, or a certificate's lifetime has
    /// passed since the next one signs.
    fn is_unused(&self, ca: &Retired, now: Timestamp, lifetimes: &Lifetimes) -> bool {
        let last = Lifetimes::backdate(lifetimes.ca) + lifetimes.settle() + lifetimes.leaf;
        ca.validity.not_after < now || self.signing.validity().is_older(last, now)
    }

    #[must_use]
    pub fn bundle(&self) -> Bundle {
        let live = std::iter::once(self.signing.pem()).chain(self.next.as_ref().map(Ca::pem));
        Bundle(live.chain(self.retired.iter().map(|ca| ca.pem.as_str())).collect())
    }

    #[must_use]
    pub fn to_entries(&self) -> BTreeMap<&'static str, String> {
        let mut entries = BTreeMap::from([
            (entry::BUNDLE, self.bundle().0),
            (entry::SIGNING.0, self.signing.pem().to_owned()),
            (entry::SIGNING.1, self.signing.key_pem()),
        ]);
        if let Some(next) = &self.next {
            entries.insert(entry::NEXT.0, next.pem().to_owned());
            entries.insert(entry::NEXT.1, next.key_pem());
        }
        entries
    }

    /// Reads what [`Keyring::to_entries`] wrote; `origin` names the Secret or folder in errors.
    ///
    /// # Errors
    /// [`CertError::Unusable`] when an entry is missing or broken.
    pub fn from_entries(origin: &str, entries: &BTreeMap<String, String>) -> Result<Self, CertError> {
        let pair = |(certificate, key): (&str, &str)| match (entries.get(certificate), entries.get(key)) {
            (Some(pem), Some(key)) => Ca::from_pem(origin, certificate, pem, key).map(Some),
            (None, None) => Ok(None),
            _ => Err(CertError::Unusable {
                origin: origin.into(),
                what: certificate.into(),
                why: format!(
                    "expected {certificate} and {key} together; delete {origin} to start with a new CA"
                ),
            }),
        };
        let signing = pair(entry::SIGNING)?.ok_or_else(|| CertError::Unusable {
            origin: origin.into(),
            what: entry::SIGNING.0.into(),
            why: format!("it is missing; delete {origin} to start with a new CA"),
        })?;
        let next = pair(entry::NEXT)?;
        let bundle = entries.get(entry::BUNDLE).map_or("", String::as_str);
        Self { signing, next, retired: Vec::new() }.with_retired(origin, &Bundle(bundle.to_owned()))
    }
}

fn is_settled(ca: &Ca, now: Timestamp, lifetimes: &Lifetimes) -> bool {
    ca.validity().is_older(Lifetimes::backdate(lifetimes.ca) + lifetimes.settle(), now)
}

fn to_pem(certificate: &CertificateDer<'_>) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new("CERTIFICATE", certificate.as_ref()), config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LIVES: Lifetimes = Lifetimes { ca: Duration::from_secs(3000), leaf: Duration::from_secs(300) };

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    fn reread(keyring: &Keyring) -> Keyring {
        let entries = keyring.to_entries().into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        Keyring::from_entries("secret a/b", &entries).unwrap()
    }

    /// Plays the clock forward in steps of 10 s, taking each step that is due.
    fn play(until: i64) -> Vec<(i64, Step, usize)> {
        let mut keyring = Keyring::generate("test", at(0), &LIVES).unwrap();
        let mut seen = Vec::new();
        for now in (0..until).step_by(10) {
            while let Some(step) = keyring.due(at(now), &LIVES) {
                keyring = reread(&keyring.take(step, "test", at(now), &LIVES).unwrap());
                seen.push((now, step, keyring.bundle().certificates().len()));
            }
            let leaf = keyring.signing().issue(&["a".into()], at(now), &LIVES).unwrap();
            assert!(leaf.validity.contains(at(now)));
        }
        seen
    }

    #[test]
    fn a_rotation_announces_then_promotes_then_forgets() {
        // CA valid -300..3000, so due at -300 + 2/3 * 3300 = 1900; settle 300 s; forgotten when its last certificate has expired.
        assert_eq!(
            play(3100),
            [(1900, Step::Announce, 2), (2200, Step::Promote, 2), (2500, Step::Forget, 1)]
        );
    }

    #[test]
    fn there_is_always_an_overlap_of_old_and_new() {
        let steps = play(20_000);
        let promotes = steps.iter().filter(|(_, step, _)| *step == Step::Promote).count();
        assert!(promotes >= 8, "{steps:?}");
        for pair in steps.windows(2) {
            if pair[1].1 == Step::Promote {
                assert!(
                    pair[1].2 >= 2,
                    "the bundle holds old and new when the new one starts to sign: {steps:?}"
                );
            }
        }
    }

    #[test]
    fn a_machine_that_slept_past_the_expiry_recovers_at_once() {
        let mut keyring = Keyring::generate("test", at(0), &LIVES).unwrap();
        let mut steps = Vec::new();
        while let Some(step) = keyring.due(at(9000), &LIVES) {
            keyring = keyring.take(step, "test", at(9000), &LIVES).unwrap();
            steps.push(step);
        }
        assert_eq!(steps, [Step::Announce, Step::Promote, Step::Forget]);
        assert!(keyring.signing().validity().contains(at(9000)));
    }

    #[test]
    fn what_follows_a_deleted_keyring_is_forgotten_and_settled_as_by_a_rotation() {
        let old = Keyring::generate("test", at(0), &LIVES).unwrap();
        let mut keyring = reread(&Keyring::successor(Some(&old.bundle()), "test", at(1000), &LIVES).unwrap());
        assert!(keyring.knows(old.signing().der()) && keyring.signing().der() != old.signing().der());
        assert!(!keyring.settled(at(1299), &LIVES) && keyring.settled(at(1300), &LIVES));
        assert_eq!(keyring.due(at(1590), &LIVES), None);
        assert_eq!(keyring.due(at(1600), &LIVES), Some(Step::Forget));
        keyring = keyring.take(Step::Forget, "test", at(1600), &LIVES).unwrap();
        assert!(!keyring.knows(old.signing().der()) && keyring.due(at(1600), &LIVES).is_none());
    }

    #[test]
    fn a_broken_keyring_says_which_entry_and_what_to_do() {
        let whole = Keyring::generate("test", at(0), &LIVES).unwrap().to_entries();
        let without = |name: &str| -> BTreeMap<String, String> {
            whole.iter().filter(|(k, _)| **k != name).map(|(k, v)| ((*k).to_owned(), v.clone())).collect()
        };
        for (entries, expected) in [
            (BTreeMap::new(), "signing.crt cannot be used: it is missing; delete secret a/b"),
            (without("signing.key"), "expected signing.crt and signing.key together"),
        ] {
            let error = Keyring::from_entries("secret a/b", &entries).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
