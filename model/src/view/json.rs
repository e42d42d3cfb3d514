//! Strings that stay in the JSON text unless an escape forces a copy, and maps of which most keys are skipped.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::Value;

/// A string. `Cow` itself would allocate for every element of a container; this one borrows. `null` is empty: some
/// clients write it where they mean nothing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Text<'a>(pub Cow<'a, str>);

impl Text<'_> {
    /// The string.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl Deref for Text<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
            fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text)))
            }
            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(Text::default())
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self)
    }
}

/// A quantity as it was written: mostly a string, a bare number in hand-written manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amount<'a> {
    text: Text<'a>,
    number: bool,
}

impl Amount<'_> {
    /// The quantity's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it is a JSON number, so that its text is JSON as it stands.
    #[must_use]
    pub const fn is_number(&self) -> bool {
        self.number
    }
}

impl From<&Amount<'_>> for Value {
    fn from(amount: &Amount<'_>) -> Self {
        let number = amount.number.then(|| amount.text.parse().ok()).flatten();
        number.map_or_else(|| Self::String(amount.text.to_string()), Self::Number)
    }
}

impl Serialize for Amount<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.number { Value::from(self).serialize(serializer) } else { self.text.serialize(serializer) }
    }
}

impl<'a> From<&'a str> for Amount<'a> {
    fn from(text: &'a str) -> Self {
        Self { text: text.into(), number: false }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Amount<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AmountVisitor;
        fn number<'a>(number: serde_json::Number) -> Amount<'a> {
            Amount { text: Text(Cow::Owned(number.to_string())), number: true }
        }
        impl<'de> Visitor<'de> for AmountVisitor {
            type Value = Amount<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity: a string or a number")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(text.into())
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                self.visit_string(text.to_owned())
            }
            fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(Amount { text: Text(Cow::Owned(text)), number: false })
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
                Ok(number(value.into()))
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
                Ok(number(value.into()))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
                serde_json::Number::from_f64(value)
                    .map(number)
                    .ok_or_else(|| E::custom(format_args!("{value} is not a quantity")))
            }
        }
        deserializer.deserialize_any(AmountVisitor)
    }
}

/// Which keys of a map are worth keeping.
pub trait Keys {
    /// True for a key whose value is kept.
    fn keep(key: &str) -> bool;
}

/// Keeps every key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllKeys {}

impl Keys for AllKeys {
    fn keep(_: &str) -> bool {
        true
    }
}

/// The entries of a small JSON object that `K` keeps, in their order; the values of others are skipped unread. `null`
/// is an empty map. Looked up by search, since these have a handful of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map<'a, V, K = AllKeys> {
    entries: Vec<(Text<'a>, V)>,
    keys: PhantomData<K>,
}

impl<V, K> Default for Map<'_, V, K> {
    fn default() -> Self {
        Self { entries: Vec::new(), keys: PhantomData }
    }
}

impl<V, K> Map<'_, V, K> {
    /// The entries in the order of the object.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &V)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// The value under `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&V> {
        self.iter().find(|(name, _)| *name == key).map(|(_, value)| value)
    }
}

impl<'a, V, K> Map<'a, V, K> {
    /// Whether it has no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds an entry at the end; `key` must be new.
    pub fn push(&mut self, key: impl Into<Text<'a>>, value: V) {
        self.entries.push((key.into(), value));
    }
}

impl<'a, V, K, T: Into<Text<'a>>> FromIterator<(T, V)> for Map<'a, V, K> {
    fn from_iter<I: IntoIterator<Item = (T, V)>>(entries: I) -> Self {
        let entries = entries.into_iter().map(|(key, value)| (key.into(), value)).collect();
        Self { entries, keys: PhantomData }
    }
}

impl<'a, V, K> IntoIterator for Map<'a, V, K> {
    type Item = (Text<'a>, V);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

impl<V: Serialize, K> Serialize for Map<'_, V, K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de: 'a, 'a, V: Deserialize<'de>, K: Keys> Deserialize<'de> for Map<'a, V, K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<V, K>(PhantomData<(V, K)>);
        impl<'de, V: Deserialize<'de>, K: Keys> Visitor<'de> for MapVisitor<V, K> {
            type Value = Map<'de, V, K>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object or null")
            }
            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Map::default())
            }
            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(key) = object.next_key::<Text<'de>>()? {
                    if K::keep(&key) {
                        entries.push((key, object.next_value()?));
                    } else {
                        object.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Map { entries, keys: PhantomData })
            }
        }
        deserializer.deserialize_any(MapVisitor(PhantomData))
    }
}

/// Cuts the tie to the text, for objects that outlive it: those of a watch.
pub trait IntoOwned {
    /// The same without a borrow.
    type Owned: 'static;
    /// Copies what is borrowed.
    fn into_owned(self) -> Self::Owned;
}

impl IntoOwned for Text<'_> {
    type Owned = Text<'static>;
    fn into_owned(self) -> Text<'static> {
        Text(Cow::Owned(self.0.into_owned()))
    }
}

impl IntoOwned for Amount<'_> {
    type Owned = Amount<'static>;
    fn into_owned(self) -> Amount<'static> {
        Amount { text: self.text.into_owned(), number: self.number }
    }
}

impl<T: IntoOwned> IntoOwned for Option<T> {
    type Owned = Option<T::Owned>;
    fn into_owned(self) -> Self::Owned {
        self.map(T::into_owned)
    }
}

impl<T: IntoOwned> IntoOwned for Vec<T> {
    type Owned = Vec<T::Owned>;
    fn into_owned(self) -> Self::Owned {
        self.into_iter().map(T::into_owned).collect()
    }
}

impl<V: IntoOwned, K: 'static> IntoOwned for Map<'_, V, K> {
    type Owned = Map<'static, V::Owned, K>;
    fn into_owned(self) -> Self::Owned {
        let entries = self.entries.into_iter().map(|(key, value)| (key.into_owned(), value.into_owned()));
        Map { entries: entries.collect(), keys: PhantomData }
    }
}

macro_rules! already_owned {
    ($($kind:ty),*) => {$(
        impl IntoOwned for $kind {
            type Owned = Self;
            fn into_owned(self) -> Self {
                self
            }
        }
    )*};
}
already_owned!(bool, i32, i64, IgnoredAny, super::ContainerStateView);

/// [`IntoOwned`] for a struct of one lifetime, field by field.
#[macro_export]
macro_rules! into_owned {
    ($view:ident { $($field:ident),* $(,)? }) => {
        impl $crate::view::json::IntoOwned for $view<'_> {
            type Owned = $view<'static>;
            fn into_owned(self) -> $view<'static> {
                $view { $($field: $crate::view::json::IntoOwned::into_owned(self.$field)),* }
            }
        }
    };
}
