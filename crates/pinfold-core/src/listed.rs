//! Enums of which a program wants all: their variants are written once.

/// **Internal to Pinfold.** An enum with a list of `ALL` its variants, in the order of their declaration; and with their names, where it has them.
#[doc(hidden)]
#[macro_export]
macro_rules! listed {
    (
        $(#[$of:meta])*
        $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident => $words:literal,)+ }
    ) => {
        $(#[$of])*
        $vis enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            /// All kinds.
            $vis const ALL: [Self; [$(stringify!($variant)),+].len()] = [$(Self::$variant),+];

            /// The kind in words.
            $vis const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $words,)+
                }
            }
        }
    };
    (
        $(#[$of:meta])*
        $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident $(= $value:expr)?,)+ }
    ) => {
        $(#[$of])*
        $vis enum $name {
            $($(#[$doc])* $variant $(= $value)?,)+
        }

        impl $name {
            /// All of them.
            $vis const ALL: [Self; [$(stringify!($variant)),+].len()] = [$(Self::$variant),+];
        }
    };
}

pub(crate) use listed;
