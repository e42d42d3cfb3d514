//! The apiserver's counters of its webhook calls.

use std::collections::BTreeMap;

use anyhow::Result;
use kube::Client;

/// How the apiserver's calls of all webhooks went, since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WebhookCalls {
    /// Answered with HTTP 200.
    pub answered: u64,
    /// Any other way: another status, no connection, no trust, too late.
    pub failed: u64,
    /// Failed, and let through because of `failurePolicy: Ignore`.
    pub failed_open: u64,
}

impl WebhookCalls {
    pub async fn read(client: &Client) -> Result<Self> {
        let request = ::http::Request::get("/metrics").body(Vec::new())?;
        Ok(Self::parse(&client.request_text(request).await?))
    }

    /// The increase since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            answered: self.answered - before.answered,
            failed: self.failed - before.failed,
            failed_open: self.failed_open - before.failed_open,
        }
    }

    fn parse(text: &str) -> Self {
        let mut calls = Self::default();
        for (name, labels, value) in text.lines().filter_map(sample) {
            match name {
                "apiserver_admission_webhook_request_total" if labels.get("code") == Some(&"200") => {
                    calls.answered += value;
                }
                "apiserver_admission_webhook_request_total" => calls.failed += value,
                "apiserver_admission_webhook_fail_open_count" => calls.failed_open += value,
                _ => {}
            }
        }
        calls
    }
}

/// `name{label="value",…} 12` taken apart; comments and samples without labels are none.
fn sample(line: &str) -> Option<(&str, BTreeMap<&str, &str>, u64)> {
    let (name, rest) = line.split_once('{')?;
    let (labels, value) = rest.rsplit_once("} ")?;
    let labels = labels
        .split(',')
        .filter_map(|pair| pair.split_once('='))
        .map(|(k, v)| (k, v.trim_matches('"')))
        .collect();
    Some((name, labels, value.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_their_code() {
        let text = "# HELP apiserver_admission_webhook_request_total [ALPHA] …\n\
            apiserver_admission_webhook_request_total{code=\"200\",name=\"a.b\",operation=\"CREATE\",rejected=\"false\",type=\"admitting\"} 7\n\
            apiserver_admission_webhook_request_total{code=\"0\",name=\"a.b\",operation=\"CREATE\",rejected=\"false\",type=\"admitting\"} 2\n\
            apiserver_admission_webhook_fail_open_count{name=\"a.b\",type=\"admitting\"} 2\n\
            apiserver_audit_event_total 0\n";
        assert_eq!(WebhookCalls::parse(text), WebhookCalls { answered: 7, failed: 2, failed_open: 2 });
    }
}
