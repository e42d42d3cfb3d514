//! Kubernetes quantities: `8Gi`, `1500m`, `1e3`.
//!
//! Rules: `k8s.io/apimachinery/pkg/api/resource/quantity.go`. Values finer than one nano are rounded up (away
//! from zero). Neither kube nor k8s-openapi parses them.

use std::fmt;
use std::str::FromStr;

const NANO: i128 = 1_000_000_000;
/// More digits than any value that Kubernetes can hold exactly.
const MOST_DIGITS: usize = 36;

/// A parsed quantity, exact to one nano. Ordered by value: `1k` equals `1000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Quantity {
    nano: i128,
}

/// Why a text is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text is not of the form `<number><suffix>`.
    #[error(
        "{0:?} is not a quantity: expected a number with an optional suffix, such as 2, 500m, 8Gi or 1e3"
    )]
    Form(String),
    /// The value is beyond what Kubernetes stores (2^63 - 1).
    #[error("{0:?} is too large: the largest quantity is 9223372036854775807")]
    TooLarge(String),
}

impl Quantity {
    /// The value, if it is a whole number that is not negative.
    #[must_use]
    pub fn whole(self) -> Option<u64> {
        if self.nano % NANO == 0 { u64::try_from(self.nano / NANO).ok() } else { None }
    }

    /// The value in thousandths, rounded up.
    #[must_use]
    pub fn milli(self) -> i128 {
        let step = NANO / 1000;
        self.nano.div_euclid(step) + i128::from(self.nano.rem_euclid(step) != 0)
    }

    /// The value, rounded up to a whole number.
    #[must_use]
    pub fn ceil(self) -> i128 {
        self.nano.div_euclid(NANO) + i128::from(self.nano.rem_euclid(NANO) != 0)
    }
}

impl From<u32> for Quantity {
    fn from(whole: u32) -> Self {
        Self { nano: i128::from(whole) * NANO }
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let form = || QuantityError::Form(text.chars().take(64).collect());
        let large = || QuantityError::TooLarge(text.chars().take(64).collect());

        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(form());
        }
        let scale = Scale::parse(suffix).ok_or_else(form)?;
        let whole = whole.trim_start_matches('0');
        let fraction = fraction.trim_end_matches('0');
        if whole.len() + fraction.len() > MOST_DIGITS {
            return Err(large());
        }
        let digits: i128 = format!("0{whole}{fraction}").parse().map_err(|_| form())?;
        let decimals = i32::try_from(fraction.len()).map_err(|_| form())?;
        let nano = scale.apply(digits, 9 - decimals).ok_or_else(large)?;
        if nano > i128::from(i64::MAX) * NANO {
            return Err(large());
        }
        Ok(Self { nano: if negative { -nano } else { nano } })
    }
}

/// What a suffix multiplies by.
enum Scale {
    Binary(u32),
    Decimal(i32),
}

impl Scale {
    fn parse(suffix: &str) -> Option<Self> {
        let scale = match suffix {
            "" => Self::Decimal(0),
            "n" => Self::Decimal(-9),
            "u" => Self::Decimal(-6),
            "m" => Self::Decimal(-3),
            "k" => Self::Decimal(3),
            "M" => Self::Decimal(6),
            "G" => Self::Decimal(9),
            "T" => Self::Decimal(12),
            "P" => Self::Decimal(15),
            "E" => Self::Decimal(18),
            "Ki" => Self::Binary(10),
            "Mi" => Self::Binary(20),
            "Gi" => Self::Binary(30),
            "Ti" => Self::Binary(40),
            "Pi" => Self::Binary(50),
            "Ei" => Self::Binary(60),
            _ => {
                let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
                Self::Decimal(exponent.clamp(-1000, 1000))
            }
        };
        Some(scale)
    }

    /// `digits` × 10^`tens` × this scale, rounded up; `None` where it overflows.
    fn apply(&self, digits: i128, tens: i32) -> Option<i128> {
        let (digits, tens) = match self {
            Self::Binary(bits) => (digits.checked_mul(1_i128 << bits)?, tens),
            Self::Decimal(exponent) => (digits, tens + exponent),
        };
        if digits == 0 {
            return Some(0);
        }
        let power = 10_i128.checked_pow(tens.unsigned_abs());
        match power {
            Some(power) if tens >= 0 => digits.checked_mul(power),
            Some(power) => Some(digits / power + i128::from(digits % power != 0)),
            None if tens >= 0 => None,
            None => Some(1),
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = [(NANO, ""), (NANO / 1000, "m"), (1000, "u")];
        for (step, suffix) in steps {
            if self.nano % step == 0 {
                return write!(f, "{}{suffix}", self.nano / step);
            }
        }
        write!(f, "{}n", self.nano)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_kubernetes_reads() {
        let table = [
            ("0", "0"),
            ("100", "100"),
            ("100.0", "100"),
            ("1k", "1000"),
            ("1e3", "1000"),
            ("1E3", "1000"),
            ("1E", "1000000000000000000"),
            ("8Gi", "8589934592"),
            ("0.5Ki", "512"),
            ("1500m", "1500m"),
            ("12.5", "12500m"),
            (".5", "500m"),
            ("5.", "5"),
            ("-1", "-1"),
            ("+2", "2"),
            ("1u", "1u"),
            ("0.0000000001", "1n"),
            ("1e-12", "1n"),
            ("9223372036854775807", "9223372036854775807"),
            ("0e999", "0"),
        ];
        for (text, canonical) in table {
            assert_eq!(text.parse::<Quantity>().map(|q| q.to_string()), Ok(canonical.to_owned()), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for text in
            ["", " 1", "1 ", "one", "1Kib", "--1", "1.2.3", ".", "e3", "1e", "1ee3", "0x10", "1_000", "١"]
        {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::Form(_))), "{text:?}");
        }
        for text in ["9223372036854775808", "1e30", "10E", "99999999999999999999999999999999999999999"] {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::TooLarge(_))), "{text:?}");
        }
    }

    #[test]
    fn whole_numbers_only() {
        assert_eq!("12.5".parse::<Quantity>().ok().and_then(Quantity::whole), None);
        assert_eq!("-1".parse::<Quantity>().ok().and_then(Quantity::whole), None);
        assert_eq!("2000m".parse::<Quantity>().ok().and_then(Quantity::whole), Some(2));
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<Quantity>();
        }

        #[test]
        fn what_is_printed_reads_back(whole in 0_u64..=1 << 62, milli in 0_u32..1000) {
            let quantity: Quantity = format!("{whole}.{milli:03}").parse().unwrap();
            prop_assert_eq!(quantity.to_string().parse::<Quantity>().unwrap(), quantity);
        }

        #[test]
        fn suffixes_multiply(value in 0_u64..1_000_000) {
            let plain: Quantity = (value * 1024).to_string().parse().unwrap();
            prop_assert_eq!(format!("{value}Ki").parse::<Quantity>().unwrap(), plain);
            let plain: Quantity = (value * 1000).to_string().parse().unwrap();
            prop_assert_eq!(format!("{value}k").parse::<Quantity>().unwrap(), plain);
            prop_assert_eq!(format!("{value}e3").parse::<Quantity>().unwrap(), plain);
        }
    }
}
