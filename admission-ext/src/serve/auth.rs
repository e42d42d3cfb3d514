//! Who may call: bind moves pods, so not everyone.
//!
//! kube-scheduler can present a client certificate (`tlsConfig.certFile`), which the TLS layer checks; and Go's client sends the user part of
//! `urlPrefix: https://extender:<token>@host/…` as basic authentication, which is the only way it has to send a token.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use subtle::ConstantTimeEq as _;

#[derive(Clone, Debug, Default)]
pub struct Callers {
    /// The same for all clones: it may be replaced while they serve.
    token: Option<Arc<ArcSwap<Token>>>,
}

#[derive(Clone)]
struct Token(Vec<u8>);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Why the configuration of callers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CallersError {
    #[error("--token-file {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("--token-file {path}: the token has {got} bytes; expected at least 16")]
    Short { path: String, got: usize },
}

impl Callers {
    /// Everyone who reaches the socket: for plain HTTP on loopback, and where TLS asks for a client certificate.
    #[must_use]
    pub fn anyone() -> Self {
        Self::default()
    }

    /// Those who know the token in `path`; white space around it does not count.
    ///
    /// # Errors
    /// Where the file cannot be read or its token is shorter than 16 bytes.
    pub fn with_token_file(self, path: &Path) -> Result<Self, CallersError> {
        Ok(Self { token: Some(Arc::new(ArcSwap::from_pointee(read(path)?))) })
    }

    /// Reads the token again: Secrets are rotated.
    ///
    /// # Errors
    /// As [`Callers::with_token_file`]; the token that was known stays.
    pub fn reload(&self, path: &Path) -> Result<(), CallersError> {
        if let Some(token) = &self.token {
            token.store(Arc::new(read(path)?));
        }
        Ok(())
    }

    /// Whether a caller with these headers may go on.
    #[must_use]
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        match &self.token {
            Some(token) => {
                presented(headers).is_some_and(|given| given.as_slice().ct_eq(&token.load().0).into())
            }
            None => true,
        }
    }
}

fn read(path: &Path) -> Result<Token, CallersError> {
    let shown = path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|source| CallersError::Read { path: shown.clone(), source })?;
    let token = text.trim().as_bytes().to_vec();
    if token.len() < 16 {
        return Err(CallersError::Short { path: shown, got: token.len() });
    }
    Ok(Token(token))
}

/// The token of `Authorization: Bearer T`, or the password of `Basic`.
fn presented(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.split_once(' ')?;
    let rest = rest.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.as_bytes().to_vec());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, rest).ok()?;
    let colon = pair.iter().position(|byte| *byte == b':')?;
    Some(pair[colon + 1..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        let mut map = HeaderMap::new();
        if !value.is_empty() {
            map.insert(AUTHORIZATION, value.parse().unwrap());
        }
        map
    }

    fn with_token(token: &str) -> Result<Callers, CallersError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), token).unwrap();
        Callers::anyone().with_token_file(file.path())
    }

    #[test]
    fn a_token_is_taken_as_bearer_or_as_the_password_that_go_sends() {
        let callers = with_token("0123456789abcdef\n").unwrap();
        // base64("extender:0123456789abcdef")
        let basic = "Basic ZXh0ZW5kZXI6MDEyMzQ1Njc4OWFiY2RlZg==";
        let table = [
            ("Bearer 0123456789abcdef", true),
            ("bearer 0123456789abcdef", true),
            (basic, true),
            ("Bearer 0123456789abcdeF", false),
            ("Bearer 0123456789abcdef0", false),
            ("Bearer 0123456789abcde", false),
            ("Basic ???", false),
            ("Digest 0123456789abcdef", false),
            ("", false),
        ];
        for (value, admitted) in table {
            assert_eq!(callers.admit(&headers(value)), admitted, "{value:?}");
        }
    }

    #[test]
    fn a_token_that_is_rotated_takes_the_place_of_the_former() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "the-former-token-of-all").unwrap();
        let callers = Callers::anyone().with_token_file(file.path()).unwrap();
        let serving = callers.clone();
        std::fs::write(file.path(), "short").unwrap();
        assert!(callers.reload(file.path()).is_err());
        assert!(
            serving.admit(&headers("Bearer the-former-token-of-all")),
            "half-written files change nothing"
        );
        std::fs::write(file.path(), "the-latter-token-of-all").unwrap();
        callers.reload(file.path()).unwrap();
        assert!(serving.admit(&headers("Bearer the-latter-token-of-all")));
        assert!(!serving.admit(&headers("Bearer the-former-token-of-all")));
    }

    #[test]
    fn a_short_token_is_refused_and_no_token_is_ever_printed() {
        assert!(with_token("short").unwrap_err().to_string().contains("at least 16"));
        assert!(!format!("{:?}", with_token("0123456789abcdef").unwrap()).contains("0123"));
    }
}
